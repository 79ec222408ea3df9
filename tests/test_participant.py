"""Participant by itself: what each message and call does, once, twice and too late."""

from typing import Any

import pytest

from statekit.errors import LeaseError
from statekit.protocol.messages import (
    OUTSIDE,
    Accept,
    AddToPart,
    Begin,
    Credit,
    Declined,
    Drop,
    Expect,
    Fence,
    Fenced,
    Fetch,
    GiveBack,
    GivenBack,
    Grant,
    Here,
    Install,
    Installed,
    InTransit,
    Lost,
    Moved,
    Never,
    Offer,
    PartFailed,
    PartWritten,
    Recover,
    Recovered,
    Released,
    Reopen,
    Restore,
    Send,
    Serve,
    Settled,
    Shut,
    Table,
    Take,
    TakeBack,
    Unexpect,
    WritePart,
    first_epoch,
    instance,
    life_of,
    maker_of,
    migration_id,
)
from statekit.protocol.participant import (
    EXPECTED,
    NONE,
    NUMBERS_MAX,
    OFFERED,
    OWNED,
    PARTIAL,
    RETURNED,
    Participant,
)

LEAVES = (0, 1)


def said(actions: list[Any], kind: type) -> Any:
    """The one message of this kind among the actions."""
    (found,) = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]
    return found


def kinds(actions: list[Any]) -> list[type]:
    return [type(a.message) if isinstance(a, Send) else type(a) for a in actions]


def owner(name: str = "a", leaves: tuple[int, ...] = LEAVES) -> Participant:
    participant = Participant(name)
    participant.own(leaves)
    return participant


def offered() -> tuple[Participant, Participant, Offer]:
    """a has offered its leaves to b, and b has heard of it."""
    a, b = owner(), owner("b", ())
    offer = said(a.begin("m", "b", LEAVES), Offer)
    b.on("a", offer)
    return a, b, offer


def here(a: Participant, leaf: int, is_whole: bool = True, migration: str = "m") -> Here:
    (serve,) = a.on("b", Fetch(migration, a.generation, 1, leaf, a.epoch_of(leaf), ("k",)))
    assert isinstance(serve, Serve)
    return serve.reply._replace(content={"k": 1}, is_whole=is_whole)


def unresolved(participant: Participant, migration: str) -> tuple[int, ...]:
    """The leaves for which a migration is open: offered, or missing, or not let go of."""
    outgoing, incoming = participant.outgoing(migration), participant.incoming(migration)
    if outgoing is not None:
        return tuple(outgoing.leaves)
    return () if incoming is None else tuple(sorted([*incoming.missing, *incoming.installed]))


def take_back(a: Participant, actions: list[Any]) -> list[Any]:
    """The process around it records that leaves are back. Returns the actions that follow."""
    (action,) = [one for one in actions if isinstance(one, TakeBack)]
    return a.taken_back(action.leaves)


def streaming() -> tuple[Participant, Participant]:
    """a has offered its leaves to b, which has opened a stream."""
    a, b, _ = offered()
    a.on("b", said(b.open_stream("m"), Accept))
    return a, b


def installed() -> tuple[Participant, Participant, Installed]:
    """Leaf 0 is at b, whole, but a does not know it yet."""
    a, b, _ = offered()
    return a, b, said(b.on("a", here(a, 0)), Installed)


# ---- Names and epochs


def test_names_tell_worker_and_incarnation() -> None:
    assert instance("host.1", 7) == "host.1.7"
    assert life_of("host.1.7") == ("host.1", 7)


def test_epochs_of_a_later_generation_are_greater_than_any_of_earlier_ones() -> None:
    assert first_epoch(3) > first_epoch(2) + 10**9


# ---- Calls of the source


def test_leaves_are_shut_before_they_are_offered() -> None:
    actions = owner().begin("m", "b", LEAVES)
    assert kinds(actions) == [Shut, Offer]
    assert actions[0] == Shut(LEAVES)


def test_beginning_again_repeats_the_offer_and_shuts_nothing() -> None:
    a = owner()
    first = said(a.begin("m", "b", LEAVES), Offer)
    (again,) = a.begin("m", "b", LEAVES)
    assert isinstance(again, Send)
    assert again.message.grants == first.grants


def test_leaves_that_are_not_owned_cannot_be_offered() -> None:
    a = owner()
    with pytest.raises(LeaseError, match="leaf 9 cannot be offered to 'b': it is not here"):
        a.begin("m", "b", [9])
    a.begin("m", "b", [0])
    with pytest.raises(LeaseError, match="leaf 0 cannot be offered to 'c': it is offered"):
        a.begin("n", "c", [0])
    with pytest.raises(LeaseError, match="it is this process"):
        a.begin("n", "a", [1])
    assert a.state_of(1) is OWNED
    assert a.begin("n", "b", []) == []


def test_a_leaf_does_not_travel_on_before_its_source_has_let_go() -> None:
    a, b, message = installed()
    with pytest.raises(LeaseError, match="'a', where it came from, has not let go"):
        b.begin("n", "c", [0])
    b.on("a", said(a.on("b", message), Released))
    assert kinds(b.begin("n", "c", [0])) == [Shut, Offer]


def test_leaves_are_owned_once() -> None:
    with pytest.raises(LeaseError, match="leaf 0 is known already"):
        owner().own([0])


def test_a_restore_of_another_generation_gives_nothing() -> None:
    a = Participant("a", 2)
    assert a.own(LEAVES, 1, generation=1) == []
    assert a.held() == []


def test_what_was_never_sent_can_be_taken_back_and_the_rest_is_named() -> None:
    a, _, _ = offered()
    here(a, 1)
    actions, uncertain = a.abort("m")
    assert actions == [TakeBack((0,))]
    assert uncertain == (1,)
    assert a.state_of(0) is RETURNED
    assert a.taken_back((0,)) == [Reopen((0,))]
    assert a.state_of(0) is OWNED
    assert a.abort("x") == ([], ())


def test_a_fetched_leaf_cannot_be_taken_back() -> None:
    a, b, _ = offered()
    for leaf in LEAVES:
        assert kinds(a.on("b", said(b.want("m", [leaf], ("k",)), Fetch))) == [Serve]
    assert a.abort("m") == ([], LEAVES)


def test_leaves_offered_to_the_dead_come_back_with_a_greater_epoch() -> None:
    a, _, message = installed()
    epoch = a.epoch_of(0)
    actions, lost = a.declare_dead("b")
    assert actions == [TakeBack(LEAVES)]
    assert a.taken_back(LEAVES) == [Reopen(LEAVES)]
    assert lost == ()
    assert a.epoch_of(0) == epoch + 1
    # The one that was declared dead speaks after all: it is told that its lease has ended.
    (answer,) = a.on("b", message)
    assert isinstance(answer, Send)
    assert answer.message[:1] + answer.message[3:] == ("m", 0, epoch + 1, "a")


def test_of_the_dead_sources_leaves_whole_ones_stay_and_others_are_lost() -> None:
    _, b, _ = installed()
    actions, lost = b.declare_dead("a")
    assert (actions, lost) == ([Unexpect((1,))], (1,))
    assert b.state_of(0) is OWNED
    assert b.is_done("m")
    assert kinds(b.begin("n", "c", [0])) == [Shut, Offer]


def test_a_target_wrongly_said_to_be_dead_gives_way() -> None:
    a, b, message = installed()
    a.declare_dead("b")
    moved = said(a.on("b", message), Moved)
    assert b.on("a", moved) == [Unexpect((0,))]
    assert b.state_of(0) is NONE
    assert b.on("a", moved) == []


# ---- Streams


def test_nothing_is_streamed_before_a_stream_is_opened() -> None:
    a, b, _ = offered()
    assert a.unsent("m") == []
    assert a.send("m", 1, 0) == []
    accept = said(b.open_stream("m"), Accept)
    a.on("b", accept)
    assert a.unsent("m") == [0, 1]
    assert a.unsent("x") == []
    assert b.open_stream("x") == []


def test_a_stream_sends_each_leaf_once_and_a_new_one_all_that_is_left() -> None:
    a, b = streaming()
    (serve,) = a.send("m", 1, 0)
    assert isinstance(serve, Serve)
    assert serve.reply.stream == 1
    assert a.send("m", 1, 0) == []
    assert a.unsent("m") == [1]
    a.served_whole("m", 1)
    assert a.unsent("m") == []
    assert a.send("m", 1, 9) == []
    a.on("b", said(b.stream_ended("m", 1), Accept))
    assert a.unsent("m") == [0, 1]
    assert a.send("m", 1, 0) == []  # it is over


def test_the_same_accept_again_opens_no_other_stream() -> None:
    a, b = streaming()
    a.send("m", 1, 0)
    a.on("b", said(b.resend(), Accept))
    assert a.unsent("m") == [1]


def test_a_stream_sends_no_more_than_it_has_credit_for_and_gets_more_as_it_is_read() -> None:
    a, b = owner("a", tuple(range(40))), Participant("b", window=8)
    b.own([])
    b.on("a", said(a.begin("m", "b", range(40)), Offer))
    a.on("b", said(b.open_stream("m"), Accept))
    read = 0
    for leaf in range(40):
        while not a.has_credit("m", 1):
            read += 1
            for action in b.received("m", 1, 1):
                assert isinstance(action, Send)
                a.on("b", action.message)
        a.send("m", 1, leaf)
        a.sent("m", 1, 1)
        assert leaf + 1 - read <= 8
    assert read == 32
    assert not a.is_current("x", 1)


def test_credit_only_grows_and_is_of_one_stream() -> None:
    a, b = streaming()
    outgoing = a.outgoing("m")
    assert outgoing is not None
    assert outgoing.credit == b.window
    a.on("b", Credit("m", 0, 1, 1, b.window + 5))
    a.on("b", Credit("m", 0, 1, 1, 7))
    assert outgoing.credit == b.window + 5
    a.on("b", said(b.stream_ended("m", 1), Accept))
    a.on("b", Credit("m", 0, 1, 1, 1 << 40))  # for the first stream
    assert outgoing.credit == b.window
    assert b.received("m", 1, 1 << 30) == []
    assert b.received("x", 1, 1 << 30) == []


def test_a_stream_that_is_not_tried_again_stays_closed() -> None:
    _, b = streaming()
    assert b.stream_ended("m", 1, is_tried_again=False) == []
    with pytest.raises(AssertionError, match="ended before"):
        b.stream_ended("m", 1)
    assert b.stream_ended("m", 7) == []


# ---- Asking for leaves


ID = migration_id("b-life-", 4)


def test_the_id_of_a_migration_tells_who_made_it_and_its_number() -> None:
    assert maker_of(ID) == ("b-life-", 4)


def test_a_begin_is_said_again_until_it_is_answered() -> None:
    a, b = owner(), owner("b", ())
    begin = said(b.ask(ID, "a", [range(2)]), Begin)
    assert said(b.resend(), Begin)[3:] == begin[3:]
    assert b.asks("a") == [ID]
    assert not b.is_done(ID)
    offer = said(a.on("b", begin), Offer)
    assert said(a.on("b", begin), Offer).grants == offer.grants  # the second one shuts nothing
    b.on("a", offer)
    assert b.asks("a") == []
    assert unresolved(b, ID) == LEAVES


def test_a_begin_tells_what_epoch_the_target_knows() -> None:
    a, b, message = installed()
    b.on("a", said(a.on("b", message), Released))
    c = owner("c", ())
    c.on("b", said(b.begin("n", "c", [0]), Offer))
    assert said(b.ask(ID, "c", [range(1)]), Begin).above == b.epoch_of(0)


def test_a_late_begin_and_one_that_is_over_are_declined() -> None:
    a = owner()
    later = migration_id("b-life-", 5)
    a.on("b", Begin(later, 0, 1, (range(1, 2),)))
    assert "comes too late" in said(a.on("b", Begin(ID, 0, 1, (range(2),))), Declined).reason
    assert kinds(a.on("b", Begin(ID, 0, 1, (range(1),)))) == [Shut, Offer]  # of others
    take_back(a, a.abort(later)[0])
    assert "is over" in said(a.on("b", Begin(later, 0, 1, (range(1, 2),))), Declined).reason
    assert a.state_of(1) is OWNED
    assert "goes to another" in said(a.on("c", Begin(ID, 0, 1, (range(1),))), Declined).reason


def test_what_was_withdrawn_does_not_begin() -> None:
    a = owner()
    a.withdraw(ID, [range(2)])
    assert kinds(a.on("b", Begin(ID, 0, 1, (range(2),)))) == [Declined]
    assert kinds(a.on("b", Begin(migration_id("b-life-", 9), 0, 1, (range(2),)))) == [Shut, Offer]


def test_a_begin_of_leaves_that_are_not_here_is_declined_and_nobody_waits_any_more() -> None:
    a, b = owner(), owner("b", ())
    declined = said(a.on("b", said(b.ask(ID, "a", [range(7, 9)]), Begin)), Declined)
    assert "not here" in declined.reason
    assert b.on("c", declined) == []
    assert b.asks("a") == [ID]
    b.on("a", declined)
    assert b.asks("a") == []
    assert b.is_done(ID)


def test_what_is_not_wanted_any_more_is_given_back_when_it_is_offered() -> None:
    a, b = owner(), owner("b", ())
    b.ask(ID, "a", [range(2)])
    offer = said(a.on("b", said(b.unask(ID), Begin)), Offer)
    actions = b.on("a", offer)
    assert kinds(actions) == [GiveBack, Accept]
    assert b.held() == []
    assert b.source_of(ID) == "a"
    b.on("a", said(a.on("b", said(actions, GiveBack)), GivenBack))
    assert b.is_done(ID)
    assert b.unask(ID) == []
    assert b.source_of(ID) == ""


def test_who_asks_anew_gets_what_it_has_lost_sight_of() -> None:
    a = owner()
    a.on("b", Begin(ID, 0, 1, (range(2),)))
    assert a.make_way("c", [range(2)]) == []
    assert a.make_way("b", [range(2, 3)]) == []
    assert take_back(a, a.make_way("b", [range(1)])) == [Reopen(LEAVES)]


def test_an_offer_that_cannot_be_taken_on_is_given_back_until_that_is_heard() -> None:
    a, b, offer = offered()
    actions = b.decline(offer)
    assert kinds(actions) == [Unexpect, GiveBack]
    assert b.held() == []
    assert kinds(b.resend()) == [GiveBack]
    b.on("a", said(a.on("b", said(actions, GiveBack)), GivenBack))
    assert b.is_done("m")
    fresh = owner("c", ())  # before it has heard of the offer
    assert kinds(fresh.decline(offer)) == [GiveBack]
    assert kinds(fresh.on("a", offer)) == [GiveBack, Accept]  # and afterwards


def test_a_leaf_that_has_come_is_not_declined() -> None:
    _, b, _ = installed()
    offer = Offer("m", 0, 1, "a", (Grant(range(2), b.epoch_of(0), 0),))
    assert said(b.decline(offer), GiveBack).leases == ((1, b.epoch_of(1)),)
    assert b.state_of(0) is OWNED


# ---- Key-groups


def grouped() -> tuple[Participant, Participant]:
    """a has offered two key-groups of two leaves to b."""
    a, b = Participant("a", subgroups=2), Participant("b", subgroups=2)
    a.own(range(4))
    b.own([])
    b.on("a", said(a.begin("m", "b", range(4)), Offer))
    return a, b


def test_key_groups_are_taken_back_as_a_whole() -> None:
    a, _ = grouped()
    here(a, 1)
    actions, uncertain = a.abort("m")
    assert actions == [TakeBack((2, 3))]
    assert uncertain == (0, 1)


def test_key_groups_are_given_back_as_a_whole() -> None:
    a, b = grouped()
    b.on("a", here(a, 1))
    assert said(b.give_back("m"), GiveBack).leases == ((2, 1), (3, 1))


def test_leaves_that_are_back_wait_for_the_others_of_their_key_group() -> None:
    a, _ = grouped()
    epoch = a.epoch_of(0)
    assert kinds(a.on("b", GiveBack("m", 0, 1, ((0, epoch),)))) == [GivenBack]
    assert a.state_of(0) is RETURNED
    assert a.waiting_back() == []
    assert kinds(a.on("b", GiveBack("m", 0, 2, ((1, epoch),)))) == [TakeBack, GivenBack]
    assert a.waiting_back() == [0, 1]


def test_what_is_left_of_a_key_group_that_died_with_its_new_owner_is_dropped() -> None:
    a, b = grouped()
    a.on("b", said(b.on("a", here(a, 0)), Installed))
    actions, _ = a.declare_dead("b")
    assert actions == [Drop(1), TakeBack((2, 3))]
    assert a.state_of(1) is NONE


def test_a_key_group_of_which_something_is_lost_with_its_old_owner_is_given_up() -> None:
    a, b = grouped()
    for leaf in (0, 2, 3):
        b.on("a", here(a, leaf))
    actions, lost = b.declare_dead("a")
    assert (actions, lost) == ([Unexpect((0, 1))], (0, 1))
    assert [b.state_of(leaf) for leaf in range(4)] == [NONE, NONE, OWNED, OWNED]


# ---- Outcomes


def test_leaves_that_are_back_are_said_again_until_that_is_recorded() -> None:
    a, _, _ = offered()
    a.abort("m")
    assert a.resend() == [TakeBack(LEAVES)]
    assert not a.is_done("m")
    with pytest.raises(LeaseError, match="it is returned"):
        a.begin("n", "c", [0])
    a.taken_back(LEAVES)
    assert a.is_done("m")
    assert a.resend() == []


def test_an_outcome_that_nobody_asked_for_is_a_bug() -> None:
    a, b, _ = offered()
    with pytest.raises(AssertionError, match="were not to be taken back"):
        a.taken_back([0])
    with pytest.raises(AssertionError, match="nobody has asked for leaf 0"):
        b.unanswered("m", [0])


def test_who_asks_for_a_leaf_is_the_only_one_until_no_answer_came() -> None:
    a, b, _ = offered()
    assert kinds(b.want("m", [0])) == [Fetch]
    assert b.want("m", [0]) == []
    assert kinds(b.want("m", [0], ("k",))) == [Fetch]  # single entries are asked for nevertheless
    b.unanswered("m", [0])
    assert kinds(b.want("m", [0])) == [Fetch]
    b.on("a", here(a, 0))
    b.unanswered("m", [0])  # it has come
    b.unanswered("x", [0])
    assert b.want("m", [0]) == []


# ---- Offers


def test_an_offer_is_expected_once_and_always_acknowledged() -> None:
    a, b = owner(), owner("b", ())
    offer = said(a.begin("m", "b", LEAVES), Offer)
    assert kinds(b.on("a", offer)) == [Expect, Accept]
    again = b.on("a", offer)
    assert kinds(again) == [Accept]
    assert said(again, Accept).waiting == ((range(2), offer.grants[0].epoch),)


def test_an_old_offer_changes_nothing() -> None:
    a, b, message = installed()
    b.on("a", said(a.on("b", message), Released))
    offer = Offer("m", 0, 1, "a", (Grant(range(1), a.epoch_of(0), 0), Grant(range(1), 0, 0)))
    assert said(b.on("a", offer), Accept).waiting == ()
    assert b.state_of(0) is OWNED


def test_a_newer_offer_supersedes_one_that_nothing_came_of() -> None:
    a, b, _ = offered()
    take_back(a, a.abort("m")[0])
    offer = said(a.begin("n", "b", LEAVES), Offer)
    assert kinds(b.on("a", offer)) == [Unexpect, Expect, Accept]
    assert b.is_done("m")
    assert unresolved(b, "n") == LEAVES


# ---- Content


def test_content_is_installed_once_and_acknowledged_until_it_is_let_go() -> None:
    a, b, _ = offered()
    content = here(a, 0)
    assert kinds(b.on("a", content)) == [Install, Installed]
    assert kinds(b.on("a", content)) == [Installed]
    b.on("a", said(a.on("b", said(b.resend()[:1], Installed)), Released))
    assert b.on("a", content) == []


def test_wanted_entries_open_a_leaf_and_the_rest_completes_it() -> None:
    a, b, _ = offered()
    assert kinds(b.on("a", here(a, 0, is_whole=False))) == [Install]
    assert b.state_of(0) is PARTIAL
    fetch = said(b.resend(), Fetch)
    assert fetch.keys == ()
    assert kinds(b.on("a", here(a, 0))) == [Install, Installed]
    assert b.state_of(0) is OWNED


def test_content_of_another_epoch_is_ignored() -> None:
    a, b, _ = offered()
    content = here(a, 0)
    assert b.on("a", content._replace(epoch=content.epoch - 1)) == []
    assert b.on("a", content._replace(epoch=content.epoch + 1)) == []
    assert b.on("a", content._replace(leaf=77)) == []
    assert b.state_of(0) is EXPECTED


def test_content_of_a_leaf_that_was_given_back_is_not_let_in() -> None:
    a, b, _ = offered()
    content = here(a, 0)
    b.on("a", here(a, 1))
    assert said(b.give_back("m"), GiveBack).leases == ((0, content.epoch),)
    assert kinds(b.on("a", content)) == [GiveBack]
    assert b.state_of(0) is NONE
    assert b.state_of(1) is OWNED


def test_wanting_asks_only_for_what_is_expected() -> None:
    a, b, _ = offered()
    assert kinds(b.want("m", [0], ("k",))) == [Fetch]
    assert b.want("m", [9]) == []
    assert b.want("x", [0]) == []
    assert a.want("m", [0]) == []


class Watched(dict[int, Any]):
    """Leaves in a record. Notes what others see of the record whenever a leaf is removed."""

    def __init__(self, leaves: Any, is_over: Any) -> None:
        super().__init__(leaves)
        self.is_over = is_over
        self.seen: list[bool] = []

    def pop(self, leaf: int, *default: Any) -> Any:
        self.seen.append(self.is_over())
        found = super().pop(leaf, *default)
        self.seen.append(self.is_over())
        return found

    def __delitem__(self, leaf: int) -> None:
        self.pop(leaf)


def last_leaf() -> tuple[Participant, Participant, Watched, Watched]:
    """A hand-over of one leaf, and what others see of it at the old and the new owner."""
    a, b = owner("a", (0,)), owner("b", ())
    b.on("a", said(a.begin("m", "b", [0]), Offer))
    incoming, outgoing = b.incoming("m"), a.outgoing("m")
    assert incoming is not None
    assert outgoing is not None
    missing = Watched(incoming.missing, lambda: incoming.is_over)
    leaves = Watched(outgoing.leaves, lambda: outgoing.is_over)
    incoming.missing, outgoing.leaves = missing, leaves
    return a, b, leaves, missing


def test_a_hand_over_never_looks_over_while_its_last_leaf_changes_its_place() -> None:
    """Other threads look at the records without a lock."""
    a, b, _, missing = last_leaf()
    b.on("a", here(a, 0))
    assert missing.seen == [False, False]
    a, b, leaves, missing = last_leaf()
    a.on("b", said(b.give_back("m"), GiveBack))
    assert missing.seen == [False, False]
    assert leaves.seen == [False, False]


# ---- Typed answers


def answer(participant: Participant, leaf: int, epoch: int, sender: str = "b") -> Any:
    (action,) = participant.on(sender, Fetch("m", participant.generation, 1, leaf, epoch))
    return action.message if isinstance(action, Send) else action


def test_every_question_about_a_leaf_has_a_typed_answer() -> None:
    a, b, _ = offered()
    epoch = a.epoch_of(0)
    assert isinstance(answer(a, 0, epoch), Serve)  # here it is
    assert isinstance(answer(a, 9, epoch), Never)  # never existed
    assert isinstance(answer(a, 0, epoch + 1), Never)
    assert isinstance(answer(b, 0, epoch, "c"), InTransit)  # in transit
    moved = answer(a, 0, epoch - 1)  # moved to b
    assert isinstance(moved, Moved)
    assert (moved.epoch, moved.to) == (epoch, "b")
    moved = answer(a, 0, epoch, "c")
    assert (moved.epoch, moved.to) == (epoch, "b")
    b.on("a", here(a, 0))
    moved = answer(b, 0, epoch - 1, "c")
    assert (moved.epoch, moved.to) == (epoch, "b")


def test_an_accept_of_an_old_lease_is_told_where_the_leaf_is() -> None:
    a, b, _ = offered()
    accept = said(b.resend(), Accept)
    a.abort("m")
    moved = [action.message for action in a.on("b", accept) if isinstance(action, Send)]
    assert [type(message) for message in moved] == [Moved, Moved]
    for message in moved:
        assert b.on("a", message) == [Unexpect((message.leaf,))]
    assert b.moved_to(0) == "a"
    assert b.is_done("m")


def test_a_source_that_knows_nothing_of_a_leaf_means_that_it_is_lost() -> None:
    _, b, offer = offered()
    never = Never("m", 0, 1, 0, offer.grants[0].epoch)
    assert b.on("a", never) == [Lost(0, "a")]
    assert b.on("c", never) == []  # not the source
    assert b.on("a", never._replace(epoch=0)) == []
    b.on("a", Here("m", 0, 1, 0, offer.grants[0].epoch, True, {}))
    assert b.on("a", never) == []  # the leaf is whole here, and nobody is left to let go of it
    assert kinds(b.begin("n", "c", [0])) == [Shut, Offer]


def test_in_transit_changes_nothing() -> None:
    _, b, offer = offered()
    assert b.on("a", InTransit("m", 0, 1, 0, offer.grants[0].epoch)) == []


# ---- The end of a lease


def test_installed_frees_the_leaf_once_and_is_always_answered() -> None:
    a, _, message = installed()
    assert kinds(a.on("b", message)) == [Drop, Released]
    assert kinds(a.on("b", message)) == [Released]
    assert a.state_of(0) is NONE
    assert a.moved_to(0) == "b"
    assert unresolved(a, "m") == (1,)


def test_installed_from_another_than_the_target_frees_nothing() -> None:
    a, _, message = installed()
    assert kinds(a.on("c", message)) == [Moved]
    assert kinds(a.on("b", message._replace(epoch=message.epoch - 1))) == [Moved]
    assert a.state_of(0) is OFFERED


def test_one_who_knows_nothing_lets_go_of_it() -> None:
    assert kinds(owner("c").on("b", Installed("m", 0, 1, 9, 5))) == [Released]


def test_released_closes_once_and_only_its_own_lease() -> None:
    a, b, message = installed()
    released = said(a.on("b", message), Released)
    assert b.on("a", released._replace(epoch=released.epoch + 1)) == []
    assert unresolved(b, "m") == (0, 1)
    assert b.on("a", released) == []
    assert unresolved(b, "m") == (1,)
    assert b.on("a", released) == []


def test_given_back_leaves_are_reopened_once_and_it_is_always_acknowledged() -> None:
    a, b, _ = offered()
    message = said(b.give_back("m"), GiveBack)
    assert b.give_back("m") == []
    assert b.give_back("x") == []
    assert kinds(a.on("b", message)) == [TakeBack, GivenBack]
    answer = a.on("b", message)
    assert kinds(answer) == [GivenBack]
    assert kinds(b.resend()) == [GiveBack]
    b.on("a", said(answer, GivenBack))
    assert b.resend() == []
    assert b.on("a", said(answer, GivenBack)) == []


def test_only_the_target_gives_back() -> None:
    a, _, offer = offered()
    lease = (0, offer.grants[0].epoch)
    assert kinds(a.on("c", GiveBack("m", 0, 1, (lease,)))) == [GivenBack]
    assert a.state_of(0) is OFFERED


def test_an_unanswered_offer_is_repeated_and_an_answered_one_is_not() -> None:
    a, b, offer = offered()
    assert said(a.resend(), Offer).grants == offer.grants
    a.on("b", said(b.resend(), Accept))
    assert a.resend() == []


# ---- Checkpoints


def test_a_checkpoint_is_taken_once_and_none_before_it() -> None:
    a = owner()
    assert a.take(3) == [WritePart(3, LEAVES, ())]
    assert a.take(3) == []
    assert a.take(2) == []


def test_offered_leaves_are_in_the_checkpoint_of_whoever_has_them_next() -> None:
    a, b, _ = offered()
    assert a.take(1) == [WritePart(1, (), ())]
    assert b.take(1) == [WritePart(1, (), ())]
    assert b.on("a", here(a, 0))[:2] == [Install(0, {"k": 1}, True), AddToPart(1, (0,))]
    message = said(b.give_back("m"), GiveBack)
    assert take_back(a, a.on("b", message)) == [AddToPart(1, (1,)), Reopen((1,))]


def test_leaves_that_wait_to_be_opened_are_added_when_they_are() -> None:
    a, b, _ = offered()
    actions = a.on("b", said(b.give_back("m"), GiveBack))
    assert a.take(1) == [WritePart(1, (), ())]
    assert take_back(a, actions) == [AddToPart(1, LEAVES), Reopen(LEAVES)]
    assert a.take(2) == [WritePart(2, LEAVES, ())]


def test_leaves_of_the_dead_are_in_no_checkpoint_that_had_begun() -> None:
    a, _, _ = offered()
    a.take(1)
    assert take_back(a, a.declare_dead("b")[0]) == [Reopen(LEAVES)]
    assert a.covered_of(0) == 1


def test_a_leaf_that_is_in_a_checkpoint_is_not_written_again_by_its_new_owner() -> None:
    a, b = owner(), owner("b", ())
    a.take(1)
    b.on("a", said(a.begin("m", "b", LEAVES), Offer))
    assert b.covered_of(0) == 1
    b.on("a", here(a, 0))
    assert b.take(1) == [WritePart(1, (), ())]
    assert b.take(2) == [WritePart(2, (0,), ())]


def test_leaves_that_are_partly_here_are_to_be_completed() -> None:
    a, b, _ = offered()
    b.on("a", here(a, 0, is_whole=False))
    assert b.take(1) == [WritePart(1, (0,), (0,))]
    assert AddToPart(1, (0,)) not in b.on("a", here(a, 0))


def test_parts_are_told_to_whoever_asked_and_again_when_asked_again() -> None:
    a = owner()
    a.take(1)
    assert a.part_written(1, [0]) == []
    assert a.on("c", Take(0, 1)) == [Send("c", PartWritten("a", 0, 1, (0,)))]
    assert a.part_written(1, [1]) == [Send("c", PartWritten("a", 0, 1, (1,)))]
    assert a.on("d", Take(0, 1)) == [Send("d", PartWritten("a", 0, 1, (0, 1)))]
    assert a.part_written(7, [1]) == []


def test_a_failed_part_stays_failed() -> None:
    a = owner()
    a.take(1)
    assert a.part_failed(1) == []
    assert a.part_written(1, [0]) == []
    assert a.on("c", Take(0, 1)) == [Send("c", PartFailed("a", 0, 1))]
    assert a.part_failed(1) == [Send("c", PartFailed("a", 0, 1))]
    assert a.part_failed(7) == []


def test_only_some_checkpoints_are_remembered() -> None:
    a = owner()
    for number in range(1, NUMBERS_MAX + 2):
        a.take(number)
    assert a.part_written(1, [0]) == []
    assert a.on("c", Take(0, 1)) == []


# ---- Tables and generations


def recovered(name: str, owners: tuple[str, ...], generation: int = 1) -> Participant:
    participant = Participant(name, OUTSIDE)
    fence, restore = participant.on("c", Recover(generation, 1, owners, 4))
    assert fence == Fence(generation)
    assert isinstance(restore, Restore)
    assert participant.own(restore.leaves, restore.number, restore.generation) == [
        Send("c", Recovered(name, generation))
    ]
    return participant


def test_a_generation_begins_with_what_the_table_gives_from_the_checkpoint() -> None:
    a = recovered("a", ("a", "b", "a"))
    assert a.held() == [0, 2]
    assert a.epoch_of(0) == first_epoch(1)
    assert a.barrier == a.covered_of(0) == 4


def test_recovering_again_restores_nothing() -> None:
    a = Participant("a", OUTSIDE)
    recover = Recover(1, 1, ("a",), 0)
    assert kinds(a.on("c", recover)) == [Fence, Restore]
    assert a.on("c", recover) == []
    a.own([0], 0, 1)
    assert a.on("d", recover) == [Send("d", Recovered("a", 1))]
    assert a.held() == [0]


def test_leaves_follow_the_table_and_it_is_said_when_all_is_in_place() -> None:
    a = recovered("a", ("a", "b"))
    b = recovered("b", ("a", "b"))
    assert a.on("c", Table(1, 1, ("a", "b"))) == [Send("c", Settled("a", 1, 1))]
    offer = said(a.on("c", Table(1, 2, ("b", "b"))), Offer)
    assert offer.version == 2
    assert a.on("c", Table(1, 1, ("a", "b"))) == []  # old
    b.on("a", offer)
    (migration,) = [offer.migration]
    message = said(b.on("a", here(a, 0, migration=migration)), Installed)
    b.on("a", said(a.on("b", message), Released))
    assert a.on("c", Table(1, 2, ("b", "b"))) == [Send("c", Settled("a", 1, 2))]
    assert b.on("c", Table(1, 2, ("b", "b"))) == [Send("c", Settled("b", 1, 2))]


def test_what_a_later_table_has_brought_stays_until_that_table_is_known() -> None:
    a = recovered("a", ("a", "b"))
    b = recovered("b", ("a", "b"))
    offer = said(a.on("c", Table(1, 2, ("b", "b"))), Offer)
    b.on("a", offer)
    message = said(b.on("a", here(a, 0, migration=offer.migration)), Installed)
    assert b.on("a", said(a.on("b", message), Released)) == []
    assert b.resend() == []
    assert kinds(b.on("c", Table(1, 3, ("a", "b")))) == [Shut, Offer]


def test_an_old_generation_is_told_so_and_a_later_one_ends_ours() -> None:
    a, b, offer = offered()
    assert a.on("c", offer._replace(generation=-1)) == [Send("c", Fenced(0))]
    assert a.on("c", Fenced(-1)) == []
    assert b.on("a", offer._replace(generation=3)) == [Fence(3)]
    assert b.held() == []
    assert b.is_fenced
    assert b.on("c", Fenced(3)) == []
    assert b.resend() == []
    assert b.take(1) == []
    assert b.on("a", offer) == [Send("a", Fenced(3))]


def test_a_fenced_participant_hears_only_that_it_may_begin_again() -> None:
    b = Participant("b", OUTSIDE)
    assert b.on("a", Offer("m", 1, 1, "a", ())) == [Fence(1)]
    assert b.on("a", Offer("m", 1, 1, "a", ())) == []
    assert kinds(b.on("c", Recover(1, 1, ("a",), 0))) == [Fence, Restore]


def test_what_is_known_of_a_leaf_that_was_never_heard_of() -> None:
    a = Participant("a")
    assert (a.state_of(5), a.epoch_of(5), a.covered_of(5), a.moved_to(5)) == (NONE, -1, 0, None)
    assert unresolved(a, "m") == ()
    assert a.is_done("m")


def test_leaves_that_go_another_way_are_not_ours_and_may_come_back() -> None:
    a, _, _ = offered()
    with pytest.raises(LeaseError, match="leaf 0 cannot go: it is offered"):
        a.disown([0])
    with pytest.raises(LeaseError, match="leaf 9 cannot go: it is not here"):
        owner("b", (3,)).disown([3, 9])
    b = owner("b", (3,))
    epoch = b.epoch_of(3)
    assert b.disown([3]) == [(range(3, 4), epoch)]
    assert b.held() == []
    assert b.moved_to(3) is None
    b.own([3])
    assert b.epoch_of(3) > epoch


def test_leaves_of_another_participant_of_the_process_keep_their_epochs() -> None:
    a, b, message = installed()
    b.on("a", said(a.on("b", message), Released))
    child = Participant("b/1")
    child.own([0], leases=b.disown([0]))
    offer = said(child.begin("n", "a", [0]), Offer)  # a remembers the epoch of its own offer
    assert kinds(a.on("b/1", offer)) == [Expect, Accept]


def test_a_leaf_that_is_on_its_way_here_was_not_moved() -> None:
    a, b, _ = offered()
    accept = said(b.resend(), Accept)
    here(a, 1)
    take_back(a, a.abort("m")[0])
    a.begin("n", "b", [0])
    b.on("a", said(a.on("b", accept), Moved))  # the new offer is late
    assert b.state_of(0) is NONE
    assert b.moved_to(0) is None


def test_fence_is_for_later_generations_only() -> None:
    a = owner()
    assert a.fence(0) == []
    assert a.held() == [0, 1]
    assert a.fence(2) == [Fence(2)]
    assert a.held() == []
