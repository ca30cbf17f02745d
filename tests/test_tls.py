"""Certificates: which files are taken, when they are read again, and whom they are for."""

from __future__ import annotations

import copy
import pickle
import shutil
import ssl

import pytest

from arpc.errors import ConfigurationError
from arpc.options import RpcOptions
from arpc.tls import TLS, CertifiedNames, name_uri
from tests.certificates import authority, tls_for

FILES = ("cert", "key", "ca")


@pytest.fixture
def files(tmp_path):
    """A worker's own copy of its files, to be changed."""
    made = {name: tmp_path / name for name in FILES}
    put(made, tls_for("near"))
    return made


def put(files, tls):
    for name in FILES:
        shutil.copyfile(getattr(tls, name), files[name])


@pytest.mark.parametrize(
    ("said", "names", "others"),
    [
        ((("DNS", "trainer"),), ["trainer"], ["Trainer", "trainer0", "*", ""]),
        ((("URI", "arpc:trainer"),), ["trainer"], ["train", "trainer0"]),
        ((("URI", "arpc:trainer*"),), ["trainer", "trainer:0"], ["a-trainer"]),
        ((("URI", name_uri("a:b")),), ["a:b"], ["a", "a%3Ab"]),
        ((("DNS", "*"),), ["*"], ["a"]),
        (
            (("URI", "arpc:ps?"), ("URI", "arpc:%5Bab%5D"), ("URI", "arpc:[!x]")),
            ["ps?", "[ab]"],
            ["ps1", "a", "b", "y"],
        ),
        ((("URI", "https://trainer"), ("email", "trainer"), ("IP Address", "trainer")), [], ["trainer"]),
        ((), [], ["", "a"]),
    ],
)
def test_whom_a_certificate_is_for(said, names, others):
    certified = CertifiedNames({"subjectAltName": said})
    assert all(name in certified for name in names)
    assert not any(name in certified for name in others)


def test_no_certificate_is_for_nobody():
    assert "a" not in CertifiedNames(None)
    assert 1 not in CertifiedNames({"subjectAltName": (("URI", "arpc:*"),)})
    assert str(CertifiedNames({})) == "no worker"


@pytest.mark.parametrize(
    "given", [{}, {"cert": "a"}, {"cert": "a", "key": "b"}, {"server": ssl.create_default_context()}]
)
def test_all_or_nothing(given):
    with pytest.raises(ConfigurationError, match="TLS takes the files cert, key and ca"):
        TLS(**given)


def test_contexts_of_a_user_must_demand_certificates():
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(ConfigurationError, match=r"the server context must demand a certificate"):
        TLS(server=server, client=client)
    server.verify_mode = ssl.CERT_REQUIRED
    with pytest.raises(ConfigurationError, match="set its check_hostname to False"):
        TLS(server=server, client=client)
    client.check_hostname = False
    tls = TLS(server=server, client=client)
    assert tls.server_context is server
    assert tls.client_context is client


def test_files_that_are_no_good(files, tmp_path):
    with pytest.raises(ConfigurationError, match=r"the TLS files cannot be used \(cert=.*No such file"):
        _ = TLS(cert=tmp_path / "none", key=files["key"], ca=files["ca"]).server_context
    files["key"].write_text("nonsense")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        _ = TLS(**files).client_context


def test_files_are_read_again_when_they_change(files, caplog):
    tls = TLS(**files)
    before = tls.server_context
    assert tls.server_context is before
    put(files, authority().issue("near"))
    after = tls.server_context
    assert after is not before
    assert tls.server_context is after


def test_files_that_do_not_fit_yet_change_nothing(files, caplog):
    tls = TLS(**files)
    before = tls.client_context
    renewed = authority().issue("other")
    shutil.copyfile(renewed.cert, files["cert"])
    assert tls.client_context is before, "the key is still the old one"
    assert tls.client_context is before
    assert caplog.text.count("still use the ones before") == 1
    shutil.copyfile(renewed.key, files["key"])
    assert tls.client_context is not before
    files["ca"].unlink()
    assert tls.client_context is not before


def test_options_with_files_travel_to_other_processes(files):
    options = RpcOptions(tls=TLS(**files))
    for again in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert again.tls.cert == files["cert"]
        assert again.tls.server_context


def test_the_environment(files, monkeypatch):
    monkeypatch.setenv("ARPC_TLS_CERT", str(files["cert"]))
    with pytest.raises(ConfigurationError, match="all of ARPC_TLS_CERT, ARPC_TLS_KEY and ARPC_TLS_CA"):
        RpcOptions()
    monkeypatch.setenv("ARPC_TLS_KEY", str(files["key"]))
    monkeypatch.setenv("ARPC_TLS_CA", str(files["ca"]))
    assert RpcOptions().tls.ca == str(files["ca"])
    assert RpcOptions().is_guarded


def test_not_a_certificate():
    with pytest.raises(ConfigurationError, match=r"tls must be an arpc\.TLS"):
        RpcOptions(tls="cert.pem")
