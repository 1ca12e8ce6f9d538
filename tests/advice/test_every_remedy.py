"""Every remedy that an error of these rooms gives is followed to its end by a test of this folder, and no other."""

from __future__ import annotations

from tests.advice.remedies import PACKAGE, followed, remedies

ROOMS = ("data", "nn")
# what the constructors of comms without a device run
CONSTRUCTORS = frozenset(
    {"process_group", "check_arguments", "check_pool", "check_descriptors", "_check_backends", "Meeting", "Owner"}
    | {"_meet", "_explained"}
)


def written(rooms: tuple[str, ...] = ROOMS) -> dict[str, list[str]]:
    """The remedies of the rooms and of the comms' constructors, with their places."""
    places = remedies(path for room in rooms for path in sorted((PACKAGE / room).glob("*.py")))
    for remedy, lines in remedies(sorted((PACKAGE / "comm").glob("*.py")), CONSTRUCTORS).items():
        places.setdefault(remedy, []).extend(lines)
    return places


def test_every_remedy_is_followed_to_its_end() -> None:
    done = followed()
    missing = {remedy: places for remedy, places in written().items() if remedy not in done}
    assert not missing, "\n".join(f"{', '.join(places)}: {remedy}" for remedy, places in missing.items())


def test_no_test_follows_a_remedy_that_no_error_gives() -> None:
    given = written(("integrations", "train", "data", "nn"))
    gone = {remedy: test for remedy, test in followed().items() if remedy not in given}
    assert not gone, "\n".join(f"{test}: {remedy}" for remedy, test in gone.items())
