"""``arpc certs``: a certificate authority for tests, and certificates for workers.

Meant for users without an authority of their own: the key of the authority is stored beside the certificates.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from arpc.errors import ConfigurationError
from arpc.extras import install_command
from arpc.ids import check_worker_name
from arpc.tls import TLS, name_uri

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = ["VALID_DAYS", "Authority", "run"]

VALID_DAYS: Final = 365
# the clocks of hosts differ a little
_EARLIER: Final = timedelta(minutes=5)


class Authority:
    """Signs certificates for workers. Its files are in one directory, and are created if they are missing."""

    def __init__(self, directory: str | os.PathLike[str], *, days: float = VALID_DAYS) -> None:
        """Raises `ConfigurationError` if cryptography is not installed."""
        try:
            import cryptography  # noqa: F401 - an optional dependency
        except ImportError:
            raise ConfigurationError(
                f"certificates are made with the package cryptography: {install_command('certs')}"
            ) from None
        self._directory = Path(directory)
        self._days = days
        self._directory.mkdir(parents=True, exist_ok=True)
        self.path = self._directory / "ca.pem"
        self._key_path = self._directory / "ca.key"
        if not self._key_path.exists():
            self._make()

    def issue(self, name: str) -> TLS:
        """Create the certificate of a worker, or of all workers that match a pattern; replaces an earlier one."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import ExtendedKeyUsageOID

        check_worker_name(name.replace("*", "") or "any")
        if name.lower() == "ca":
            raise ConfigurationError(f"a worker cannot be called {name!r} here: the files of the authority are")
        ca = x509.load_pem_x509_certificate(self.path.read_bytes())
        ca_key: Any = serialization.load_pem_private_key(self._key_path.read_bytes(), None)
        key = _new_key()
        builder = (
            _begun(name, self._days)
            .issuer_name(ca.subject)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name_uri(name))]), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        )
        file_name = quote(name, safe=":")
        cert_path, key_path = self._directory / f"{file_name}.pem", self._directory / f"{file_name}.key"
        _write_secret(key_path, _pem(key))
        _write(cert_path, builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return TLS(cert=cert_path, key=key_path, ca=self.path)

    def _make(self) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        key = _new_key()
        builder = _begun("arpc test authority", self._days)
        builder = (
            builder.issuer_name(_subject("arpc test authority"))
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        _write_secret(self._key_path, _pem(key))
        _write(self.path, builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _begun(name: str, days: float) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file atomically: a worker may be reading it."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    beside.replace(path)


def _write_secret(path: Path, data: bytes) -> None:
    _write(path, data, 0o600)


def run(options: argparse.Namespace) -> int:
    """Create the files and print the variables to set; return the exit status."""
    try:
        authority = Authority(options.directory, days=options.days)
        for name in options.names:
            tls = authority.issue(name)
            print(f"# {name}\nARPC_TLS_CERT={tls.cert} ARPC_TLS_KEY={tls.key} ARPC_TLS_CA={tls.ca}")
    except ConfigurationError as error:
        print(f"arpc certs: {error}", file=sys.stderr)
        return 1
    return 0
