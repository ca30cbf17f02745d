"""TorchScript functions and modules over calls; programs of torch.export and functions of torch.compile as well."""

from arpc.torchscript.operators import Operator, builtin_operator
from arpc.torchscript.programs import module_of
from arpc.torchscript.types import parse_type, text_of

__all__ = ["Operator", "builtin_operator", "module_of", "parse_type", "text_of"]
