"""Remote calls of TorchScript functions and modules, torch.export programs and torch.compile functions."""

from arpc.torchscript.operators import Operator, builtin_operator
from arpc.torchscript.programs import module_of
from arpc.torchscript.types import parse_type, text_of

__all__ = ["Operator", "builtin_operator", "module_of", "parse_type", "text_of"]
