"""The crawler of the built pages finds links, pictures and anchors that lead nowhere."""

from __future__ import annotations

from scripts.check_links import broken_links


def test_what_leads_nowhere_is_named(tmp_path):
    (tmp_path / "index.html").write_text(
        '<h1 id="top">a</h1><a href="other.html#there">b</a><a href="other.html#gone">c</a><a href="missing.html">d</a>'
        '<img src="picture.png"><a href="https://example.org/anything">e</a><a href="#top">f</a>'
    )
    (tmp_path / "other.html").write_text('<p id="there">g</p><a href="index.html">h</a>')
    assert list(broken_links(tmp_path)) == [
        "index.html: missing.html: no such file",
        "index.html: other.html#gone: no such anchor",
        "index.html: picture.png: no such file",
    ]
