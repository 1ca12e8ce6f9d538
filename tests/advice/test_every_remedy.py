"""Every remedy that a message of these rooms gives is followed to its end by a test of this folder, and no other."""

from __future__ import annotations

from pathlib import Path

from tests.advice.remedies import HOLE, PACKAGE, followed, remedies

ROOMS = ("integrations", "foreign", "trial", "train", "data", "nn")
BESIDE = PACKAGE / "ops" / "core" / "regions.py"  # the checkpoints that rooms above refuse
# what runs when a comm has been made, as all of `protocol` does; other functions are taken for those of constructors,
# so that no remedy of one is overlooked: add here what is none
AFTERWARDS = frozenset(
    {"exchange", "empty", "waited", "entered", "mismatch", "fail", "_on_device", "_wrong_devices"}
    | {"_stand_in", "_stuck", "_look", "_match", "_fail_of_cycle", "_receive_pieces", "told"}
)


def written() -> dict[str, list[str]]:
    """The remedies of the rooms and of the comms' constructors, with their places."""
    places = remedies([*(path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))), BESIDE])
    constructors = sorted(path for path in (PACKAGE / "comm").rglob("*.py") if path.stem != "protocol")
    for remedy, lines in remedies(constructors, AFTERWARDS).items():
        places.setdefault(remedy, []).extend(lines)
    return places


def test_every_remedy_is_followed_to_its_end_as_often_as_it_is_given() -> None:
    done = followed()
    missing = {remedy: places for remedy, places in written().items() if len(done.get(remedy, ())) < len(places)}
    assert not missing, "\n".join(f"{', '.join(places)}: {remedy}" for remedy, places in missing.items())


def test_no_test_follows_a_remedy_that_no_message_gives() -> None:
    given = written()
    gone = {remedy: tests for remedy, tests in followed().items() if remedy not in given}
    assert not gone, "\n".join(f"{', '.join(tests)}: {remedy}" for remedy, tests in gone.items())


SOURCE = """
'''A docstring; say nothing.'''
KEPT = "given in a name; do a"

class Refusal(ValueError):
    text = "given in a class; do b"

def returned(x):
    return f"got {x}; do {x}" if x else "given " + str(x) + "; do c"

def skipped():
    raise ValueError("later; do nothing")

def warned(x, way):
    warnings.warn(f"{x}{'; do d' if x else ''}")
    raise Refusal(f"put together; {way}")

def joined(ways):
    raise Refusal("; ".join(ways) + " is what to do")
"""


def test_a_remedy_is_seen_wherever_its_string_is(tmp_path: Path) -> None:
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    found = remedies([file], frozenset({"skipped"}))
    assert found.keys() == {"do a", "do b", "do {}", "do c", "do d", HOLE}
    assert found["do b"] == [f"{tmp_path.name}/source.py:6"] and len(found[HOLE]) == 2
