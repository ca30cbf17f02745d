from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpc.launch.output import LONGEST_LINE_BYTES, LineSplitter, Screen, Tail, last_traceback, lost_another
from arpc.launch.plan import as_group
from arpc.launch.status import Status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def split(*pieces: bytes) -> list[str]:
    splitter = LineSplitter()
    return [line for piece in pieces for line in splitter.feed(piece)] + list(splitter.end())


def test_lines_in_pieces():
    assert split(b"on", b"e\ntw", b"o\n\nthree") == ["one", "two", "", "three"]


def test_a_character_in_pieces():
    assert split(b"gr\xc3", b"\xbcn\n") == ["grün"]


def test_bytes_that_are_no_text():
    assert split(b"\xff\n") == ["\N{REPLACEMENT CHARACTER}"]


def test_what_was_overwritten_is_not_shown():
    assert split(b" 10%\r 50%", b"\r100%\r\nnext\r\n") == ["100%", "next"]


def test_a_line_that_is_written_over_is_progress():
    splitter = LineSplitter()
    assert list(splitter.feed(b"one\n 10%\r 20%")) == ["one"]
    assert splitter.progress == " 20%"
    assert list(splitter.feed(b"\r\x1b[2K\x1b[32m100%\x1b[0m\n\x1b[?25htwo")) == ["\x1b[32m100%\x1b[0m"]
    assert splitter.progress == ""  # nothing says that this line will be written over
    assert list(splitter.end()) == ["two"]


def test_a_line_without_an_end_is_cut():
    lines = split(b"x" * (2 * LONGEST_LINE_BYTES + 1))
    assert [len(line) for line in lines] == [LONGEST_LINE_BYTES, LONGEST_LINE_BYTES, 1]


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"d\ne"])))
def test_how_it_is_cut_into_pieces_does_not_matter(pieces: list[bytes]):
    assert split(*pieces) == split(b"".join(pieces))


TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ValueError: no"]


def test_the_last_traceback():
    noise = ["hello", *TRACEBACK, "handled, going on"]
    last = [*TRACEBACK[:2], "KeyError: 'really'"]
    assert last_traceback([*noise, *last]) == "\n".join(last)
    assert last_traceback(["all", "is", "well"]) == ""


@pytest.mark.parametrize(
    "link",
    [
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    ],
)
def test_a_chain_is_shown_from_its_beginning(link: str):
    chain = [*TRACEBACK, "", link, "", *TRACEBACK, "", link, "", *TRACEBACK]
    assert last_traceback(["before", *chain]) == "\n".join(chain)


def test_a_group_of_exceptions():
    group = ["  + Exception Group Traceback (most recent call last):", "  | ExceptionGroup: unhandled", "  +----"]
    assert last_traceback(["before", *group]) == "\n".join(group)


def test_a_tail_keeps_the_end():
    tail = Tail()
    for number in range(10_000):
        tail.add(f"line {number}")
    for line in TRACEBACK:
        tail.add(line)
    assert tail.traceback == "\n".join(TRACEBACK)


def test_losing_another_worker_is_not_its_own_fault():
    lost = [*TRACEBACK[:2], "arpc.errors.WorkerLostError: worker 'ps0' was lost", "and more of the text"]
    assert lost_another("\n".join(lost[:3]))
    assert not lost_another("\n".join(TRACEBACK))
    assert not lost_another("")
    # a remote traceback stands before the exception that it caused
    assert not lost_another("\n".join([*lost[:3], "", *TRACEBACK]))


def test_lines_have_the_name_of_their_worker():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(as_group({"ps": 1, "trainer": 1}), out, err)
    screen.show_status(Status(2, 2, 0.0))
    screen.line(0, "stdout", "hello")
    screen.line(1, "stderr", "there")
    screen.close()
    assert out.getvalue() == "[ps0] hello\n"
    assert err.getvalue() == "[trainer0] there\n"


def test_a_terminal_has_colours_and_a_line_that_stays_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    screen = Screen(as_group(1), terminal, terminal)
    status = Status(1, 1, 0.0)
    screen.show_status(status)
    screen.line(0, "stdout", "hello")
    assert terminal.getvalue().endswith(f"\x1b[36m[worker0]\x1b[0m hello\n{status.styled(79)}")
    screen.close()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_progress_bar_stays_below_the_lines_until_it_is_finished(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    screen = Screen(as_group(2), terminal, terminal)
    screen.show_status(Status(2, 2, 0.0))
    screen.show_progress(1, "50%")
    below = "\x1b[?7l[worker1] 50%\n2/2 workers  0 s\x1b[0m\x1b[?7h"
    assert terminal.getvalue().endswith(f"\r\x1b[K{below}")
    screen.line(0, "stdout", "hello")
    assert terminal.getvalue().endswith(f"\r\x1b[1A\x1b[J[worker0] hello\n{below}")
    before = terminal.getvalue()
    screen.show_progress(1, "50%")
    assert terminal.getvalue() == before  # nothing has changed
    screen.show_progress(1, "")
    assert terminal.getvalue().endswith("\r\x1b[1A\x1b[J2/2 workers  0 s")
    assert screen.columns == 80 - 2 - len("[worker1]")


def test_without_a_terminal_there_is_no_progress():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(as_group(1), out, err)
    screen.show_progress(0, "50%")
    assert (out.getvalue(), err.getvalue(), screen.columns) == ("", "", None)


def test_a_terminal_without_colours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    screen = Screen(as_group(1), terminal, terminal)
    screen.line(0, "stdout", "hello")
    screen.say("that was bad", is_bad=True)
    assert terminal.getvalue() == "\r\x1b[K[worker0] hello\n\r\x1b[Kthat was bad\n"


def test_a_reader_that_left_is_noticed():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    screen = Screen(as_group(1), Gone(), io.StringIO())
    screen.line(0, "stdout", "hello")
    assert screen.is_closed
    screen.line(0, "stdout", "hello")


def test_what_the_terminal_has_no_letters_for_is_spelt_out():
    raw = io.BytesIO()
    screen = Screen(as_group(1), io.TextIOWrapper(raw, encoding="ascii"), io.StringIO())
    screen.line(0, "stdout", "grün")
    assert raw.getvalue() == b"[worker0] gr\\xfcn\n"
    assert not screen.is_closed
