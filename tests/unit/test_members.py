"""Messages name ranks by their number in the job, and hosts where there are several."""

from commlayer.transport.members import TOLD_MAX, Members


def test_ranks_have_their_number_in_the_job() -> None:
    members = Members("7", 1, [4, 9, 2])
    assert members.who == "rank 9 of group '7'"
    assert members.name(0) == "rank 4"
    assert members.names([2, 1]) == "rank(s) 2, 9"


def test_hosts_are_named_where_the_group_has_several() -> None:
    one = Members("7", 0, [4, 9], {4: "hosta", 9: "hosta", 0: "hostb"})
    assert one.names([0, 1]) == "rank(s) 4, 9"
    several = Members("7", 0, [4, 9, 2], {4: "hosta", 9: "hostb"})
    assert several.name(1) == "rank 9 (hostb)"
    assert several.names(range(3)) == "rank(s) 4 (hosta), 9 (hostb), 2"


def test_a_message_names_a_few_of_many_ranks() -> None:
    members = Members("0", 0, range(1000))
    assert members.names(range(TOLD_MAX)).endswith(f"{TOLD_MAX - 2}, {TOLD_MAX - 1}")
    assert members.names(range(1000)).endswith(f", {TOLD_MAX - 1} and {1000 - TOLD_MAX} others")
