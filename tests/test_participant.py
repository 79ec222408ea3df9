"""Participant by itself: what each message and call does, once, twice and too late."""

from typing import Any

import pytest

from statekit.errors import LeaseError
from statekit.protocol.messages import (
    OUTSIDE,
    Accept,
    AddToPart,
    Credit,
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
    Part,
    PartFailed,
    Recover,
    Recovered,
    Refuse,
    Released,
    Reopen,
    Restore,
    Send,
    Serve,
    Settled,
    Shut,
    Table,
    Take,
    Unexpect,
    WritePart,
    first_epoch,
    instance,
    life_of,
)
from statekit.protocol.participant import (
    EXPECTED,
    NONE,
    NUMBERS_MAX,
    OFFERED,
    OWNED,
    PARTIAL,
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


def here(a: Participant, leaf: int, is_whole: bool = True) -> Here:
    (serve,) = a.send("m", leaf)
    assert isinstance(serve, Serve)
    return serve.reply._replace(content={"k": 1}, is_whole=is_whole)


def installed() -> tuple[Participant, Participant, Installed]:
    """Leaf 0 is at b, whole, and a has not heard of it."""
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
    a.send("m", 1)
    actions, uncertain = a.abort("m")
    assert actions == [Reopen((0,))]
    assert uncertain == (1,)
    assert a.state_of(0) is OWNED
    assert a.abort("x") == ([], ())


def test_a_fetched_leaf_cannot_be_taken_back() -> None:
    a, b, _ = offered()
    assert kinds(a.on("b", said(b.want(0, ("k",)), Fetch))) == [Serve]
    assert a.abort("m", [0]) == ([], LEAVES)


def test_leaves_offered_to_the_dead_come_back_with_a_greater_epoch() -> None:
    a, _, message = installed()
    epoch = a.epoch_of(0)
    actions, lost = a.declare_dead("b")
    assert actions == [Reopen(LEAVES)]
    assert lost == ()
    assert a.epoch_of(0) == epoch + 1
    # The dead one speaks after all: it is told that its lease has ended.
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


def test_the_stream_sends_what_was_not_sent_and_what_was_lost() -> None:
    a, b, _ = offered()
    assert a.unsent("m") == [0, 1]
    here(a, 0)
    assert a.unsent("m") == [1]
    a.sent("m", 1)
    assert a.unsent("m") == []
    a.on("b", said(b.resend(), Accept))
    assert a.unsent("m") == [0, 1]
    assert a.unsent("x") == []
    assert a.send("m", 9) == []


def test_credit_only_grows() -> None:
    a, b, _ = offered()
    assert a.credit_of("m") == a.credit_of("x") == 0
    credit = said(b.grant("m", 100), Credit)
    a.on("b", said(b.grant("m", 200), Credit))
    a.on("b", credit)
    assert a.credit_of("m") == 200
    assert b.grant("x", 100) == []


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
    a.abort("m")
    offer = said(a.begin("n", "b", LEAVES), Offer)
    assert kinds(b.on("a", offer)) == [Unexpect, Expect, Accept]
    assert b.is_done("m")
    assert b.unresolved("n") == LEAVES


def test_a_refused_offer_comes_back_though_the_refusal_is_lost() -> None:
    a, b = owner(), owner("b", ())
    b.refuses = "no memory"
    actions = b.on("a", said(a.begin("m", "b", LEAVES), Offer))
    assert kinds(actions) == [Refuse, Accept]
    assert said(actions, Refuse).reason == "no memory"
    a.on("b", said(actions, Accept))
    answer = a.on("b", said(b.resend(), GiveBack))
    assert kinds(answer) == [Reopen, GivenBack]
    b.on("a", said(answer, GivenBack))
    assert b.is_done("m")
    assert a.is_done("m")
    assert b.resend() == []


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
    assert kinds(b.give_back("m", [0])) == [Unexpect, GiveBack]
    assert kinds(b.on("a", content)) == [GiveBack]
    assert b.state_of(0) is NONE
    assert b.state_of(1) is EXPECTED


def test_wanting_asks_only_for_what_is_expected() -> None:
    a, b, _ = offered()
    assert kinds(b.want(0, ("k",))) == [Fetch]
    assert b.want(9) == []
    assert a.want(0) == []


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
    assert b.on("a", never) == []  # it is all here


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
    assert a.unresolved("m") == (1,)


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
    assert b.unresolved("m") == (0, 1)
    assert b.on("a", released) == []
    assert b.unresolved("m") == (1,)
    assert b.on("a", released) == []


def test_given_back_leaves_are_reopened_once_and_it_is_always_acknowledged() -> None:
    a, b, _ = offered()
    message = said(b.give_back("m"), GiveBack)
    assert b.give_back("m") == []
    assert b.give_back("x") == []
    assert kinds(a.on("b", message)) == [Reopen, GivenBack]
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
    assert b.on("a", here(a, 0))[:2] == [Install(0, {"k": 1}, True), AddToPart(1, 0)]
    message = said(b.give_back("m"), GiveBack)
    assert a.on("b", message)[:2] == [AddToPart(1, 1), Reopen((1,))]


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
    assert AddToPart(1, 0) not in b.on("a", here(a, 0))


def test_parts_are_told_to_whoever_asked_and_again_when_asked_again() -> None:
    a = owner()
    a.take(1)
    assert a.part_written(1, [0]) == []
    assert a.on("c", Take(0, 1)) == [Send("c", Part("a", 0, 1, (0,)))]
    assert a.part_written(1, [1]) == [Send("c", Part("a", 0, 1, (1,)))]
    assert a.on("d", Take(0, 1)) == [Send("d", Part("a", 0, 1, (0, 1)))]
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
    (serve,) = a.send(migration, 0)
    assert isinstance(serve, Serve)
    message = said(b.on("a", serve.reply._replace(content={})), Installed)
    b.on("a", said(a.on("b", message), Released))
    assert a.on("c", Table(1, 2, ("b", "b"))) == [Send("c", Settled("a", 1, 2))]
    assert b.on("c", Table(1, 2, ("b", "b"))) == [Send("c", Settled("b", 1, 2))]


def test_what_a_later_table_has_brought_stays_until_that_table_is_known() -> None:
    a = recovered("a", ("a", "b"))
    b = recovered("b", ("a", "b"))
    offer = said(a.on("c", Table(1, 2, ("b", "b"))), Offer)
    b.on("a", offer)
    (serve,) = a.send(offer.migration, 0)
    assert isinstance(serve, Serve)
    message = said(b.on("a", serve.reply._replace(content={})), Installed)
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
    assert a.unresolved("m") == ()
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
    a.abort("m", [0])
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


def test_only_what_is_offered_and_never_sent_is_unsent() -> None:
    a, _, _ = offered()
    assert a.is_unsent("m", 0)
    here(a, 0)
    assert not a.is_unsent("m", 0)
    assert not a.is_unsent("x", 1)
    assert not a.is_unsent("m", 9)
