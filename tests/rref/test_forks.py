"""The fork protocol as lists of events: what happened, and what is to be done about it."""

from __future__ import annotations

import pytest

from arpc.ids import UNKNOWN_ID, GloballyUniqueId, WorkerInfo
from arpc.rref.instructions import AwaitCreation, FailValue, ForgetFork, MarkConfirmed, MarkLost
from arpc.rref.states import OwnerState, UserState
from tests.rref.events import (
    ChildAccepted,
    CreationAbandoned,
    CreationArrived,
    CreationConfirmed,
    CreationDenied,
    CreationEnded,
    CreationFailed,
    CreationStarted,
    DropValue,
    Event,
    FailureAcknowledged,
    Following,
    ForkConfirmed,
    ForkOffered,
    ForkReceived,
    ForkRefused,
    ForkRequested,
    HandleDropped,
    Machine,
    OfferKnown,
    OfferQueried,
    OfferRefused,
    OwnerHandleDropped,
    OwnerUnreached,
    PeerConnected,
    PeerLost,
    RunCreation,
    SendChildAccept,
    SendCreationFailed,
    SendForkRequest,
    SendUserDelete,
    UserDeleted,
    ValueAwaited,
    ValueShared,
    machine,
    tell,
)


def unique(created_on: int, local_id: int) -> int:
    return GloballyUniqueId(created_on, local_id).to_int()


A, B, C = WorkerInfo("a", 0), WorkerInfo("b", 1), WorkerInfo("c", 2)
B_AGAIN = WorkerInfo("b", 3)  # started again, under the same name
SOME_B = WorkerInfo("b", UNKNOWN_ID)
R = unique(0, 0)  # made by a, whose id is 0
F, G, H = unique(0, 1), unique(0, 2), unique(2, 0)
OWN = unique(1, 0)  # made by b, the owner, whose id is 1


def run(forks: Machine, *events: Event) -> Following:
    return [instruction for event in events for instruction in tell(forks, event)]


def a() -> Machine:
    return machine(A)


def b() -> Machine:
    return machine(B)


def c() -> Machine:
    return machine(C)


# -- creator and owner


def test_a_dropped_rref_is_deleted_once_its_creation_is_confirmed():
    forks = a()
    assert run(forks, CreationStarted(R, F, B), HandleDropped(F)) == []
    assert run(forks, CreationConfirmed(B, R, F)) == [SendUserDelete(B, R, F)]
    assert forks.is_idle


def test_the_owner_keeps_a_value_while_a_fork_is_counted():
    forks = b()
    assert run(forks, CreationArrived(R, F, A), CreationEnded(R)) == [RunCreation(R)]
    assert run(forks, ForkRequested(R, H, C, is_created=True), UserDeleted(R, F)) == []
    assert run(forks, UserDeleted(R, H)) == [DropValue(R)]
    assert forks.is_idle


def test_a_value_is_not_dropped_while_its_function_runs():
    forks = b()
    run(forks, CreationArrived(R, F, A))
    assert run(forks, UserDeleted(R, F)) == []
    assert run(forks, CreationEnded(R)) == [DropValue(R)]


def test_a_creation_is_run_once():
    forks = b()
    assert run(forks, CreationArrived(R, F, A), CreationArrived(R, F, A)) == [RunCreation(R)]


def test_a_creation_on_oneself_is_held_by_its_handle_and_by_itself():
    forks = b()
    assert run(forks, CreationStarted(OWN, F, B)) == []
    assert not forks.users
    assert run(forks, CreationArrived(OWN, F, B), OwnerHandleDropped(OWN)) == [RunCreation(OWN)]
    assert run(forks, CreationEnded(OWN)) == []  # its own fork
    assert run(forks, UserDeleted(OWN, F)) == [DropValue(OWN)]


def test_the_owner_is_told_at_once_that_a_creation_failed_and_then_that_its_user_ended():
    forks = a()
    run(forks, CreationStarted(R, F, B))
    assert run(forks, CreationFailed(F, 7, "cut")) == [SendCreationFailed(B, R, F, 7, "cut")]
    assert run(forks, CreationFailed(F, 7, "cut")) == []
    assert run(forks, HandleDropped(F)) == []  # the news counts the fork, and its end must not overtake that
    assert run(forks, FailureAcknowledged(B, R, F)) == [SendUserDelete(B, R, F)]
    assert forks.is_idle


def test_a_failed_creation_is_kept_for_its_children():
    forks = a()
    run(forks, CreationStarted(R, F, B), ForkOffered(R, G, C, F), CreationFailed(F, 7, "cut"), HandleDropped(F))
    assert run(forks, FailureAcknowledged(B, R, F)) == []
    assert run(forks, ChildAccepted(G)) == [SendUserDelete(B, R, F)]


def test_an_owner_that_is_lost_need_not_acknowledge_a_failure():
    forks = a()
    run(forks, CreationStarted(R, F, B), CreationFailed(F, 7, "cut"), HandleDropped(F))
    assert run(forks, PeerLost(B)) == [MarkLost(F), ForgetFork(F)]
    assert forks.is_idle


@pytest.mark.parametrize(
    ("event", "is_created"), [(CreationConfirmed(B, R, F), True), (CreationFailed(F, 1, ""), False)]
)
def test_only_a_confirmed_creation_is_known_to_have_reached_its_owner(event, is_created):
    forks = a()
    run(forks, CreationStarted(R, F, B))
    assert not forks.users[F].is_created
    run(forks, event)
    assert forks.users[F].is_created == is_created


def test_a_creation_that_was_abandoned_before_it_arrives_is_not_run():
    forks = b()
    assert run(forks, CreationAbandoned(R, F, A, "cut")) == [FailValue(forks.owned[R], "cut")]
    assert run(forks, CreationArrived(R, F, A)) == []
    assert run(forks, UserDeleted(R, F)) == [DropValue(R)]
    assert forks.is_idle


@pytest.mark.parametrize("ends", [[], [CreationEnded(R)]])
def test_a_creation_that_has_arrived_is_not_abandoned_any_more(ends):
    forks = b()
    assert run(forks, CreationArrived(R, F, A), *ends) == [RunCreation(R)]
    assert run(forks, CreationAbandoned(R, F, A, "cut"), CreationDenied(R)) == []
    assert run(forks, *([] if ends else [CreationEnded(R)]), UserDeleted(R, F)) == [DropValue(R)]


def test_users_of_an_abandoned_creation_hear_of_it():
    forks = b()
    assert run(forks, ForkRequested(R, H, C, is_created=False)) == [AwaitCreation(R)]
    assert forks.owned[R].state is OwnerState.EXPECTED
    assert run(forks, CreationAbandoned(R, F, A, "cut")) == [FailValue(forks.owned[R], "cut")]
    assert run(forks, CreationAbandoned(R, F, A, "cut")) == []
    assert run(forks, CreationArrived(R, F, A), UserDeleted(R, F)) == []
    assert run(forks, UserDeleted(R, H)) == [DropValue(R)]


def test_users_that_come_after_a_creation_was_abandoned_find_the_error():
    forks = b()
    run(forks, CreationAbandoned(R, F, A, "cut"))
    # the creator keeps its fork until they are counted
    assert run(forks, ForkRequested(R, H, C, is_created=False), ValueAwaited(R, is_created=False)) == []
    assert forks.counts(R, H)
    assert run(forks, UserDeleted(R, F), OwnerHandleDropped(R)) == []
    assert run(forks, UserDeleted(R, H)) == [DropValue(R)]
    assert forks.is_idle


def test_a_creation_that_its_creator_knows_nothing_of_is_not_expected_any_more():
    forks = b()
    run(forks, ForkRequested(R, H, C, is_created=False))
    (failed,) = run(forks, CreationDenied(R))
    assert failed == FailValue(forks.owned[R], failed.reason)
    assert run(forks, CreationDenied(R), CreationArrived(R, F, A)) == []
    assert run(forks, UserDeleted(R, H)) == [DropValue(R)]
    assert run(forks, CreationDenied(R)) == []
    assert forks.is_idle


@pytest.mark.parametrize("owner", [B, SOME_B])
def test_a_creator_knows_what_it_wants_created_and_by_whom(owner):
    forks = a()
    run(forks, CreationStarted(R, F, owner))
    assert forks.creations_under_way(B) == {R}
    assert not forks.creations_under_way(C)
    assert forks.creations_under_way(B_AGAIN) == ({R} if owner == SOME_B else set())
    run(forks, CreationFailed(F, 1, "cut"))
    assert not forks.creations_under_way(B)


# -- user to user


def test_a_child_asks_the_owner_and_then_tells_its_parent():
    forks = c()
    assert run(forks, ForkReceived(R, G, B, A, is_created=True)) == [SendForkRequest(B, R, G, is_created=True)]
    assert forks.users[G].state is UserState.REQUESTED
    assert run(forks, ForkConfirmed(B, R, G)) == [MarkConfirmed(G), SendChildAccept(A, G)]
    assert run(forks, HandleDropped(G)) == [SendUserDelete(B, R, G)]


@pytest.mark.parametrize("is_created", [True, False])
def test_a_child_passes_on_what_its_parent_knew_of_the_creation(is_created):
    forks = c()
    assert run(forks, ForkReceived(R, G, B, A, is_created)) == [SendForkRequest(B, R, G, is_created)]
    assert forks.users[G].is_created == is_created


def test_a_parent_is_kept_until_its_child_is_accepted():
    forks = a()
    run(forks, CreationStarted(R, F, B), CreationConfirmed(B, R, F), ForkOffered(R, G, C, F))
    assert run(forks, HandleDropped(F)) == []
    assert run(forks, ChildAccepted(G)) == [SendUserDelete(B, R, F)]
    assert run(forks, ChildAccepted(G)) == []


def test_a_dropped_child_still_waits_for_its_confirmation():
    forks = c()
    run(forks, ForkReceived(R, G, B, A, is_created=True))
    assert run(forks, HandleDropped(G)) == []
    assert run(forks, ForkConfirmed(B, R, G)) == [
        MarkConfirmed(G),
        SendChildAccept(A, G),
        SendUserDelete(B, R, G),
    ]


def test_a_fork_that_arrives_twice_is_one_fork_with_two_handles():
    forks = c()
    run(forks, ForkReceived(R, G, B, A, is_created=True), ForkConfirmed(B, R, G))
    assert run(forks, ForkReceived(R, G, B, A, is_created=True)) == []
    assert run(forks, HandleDropped(G)) == []
    assert run(forks, HandleDropped(G)) == [SendUserDelete(B, R, G)]


def test_a_refused_child_lets_its_parent_go():
    forks = c()
    run(forks, ForkReceived(R, G, B, A, is_created=True))
    assert run(forks, ForkRefused(G)) == [MarkLost(G, is_refused=True), SendChildAccept(A, G)]
    assert run(forks, HandleDropped(G)) == [ForgetFork(G)]


def test_an_rref_sent_to_oneself_is_another_fork():
    forks = a()
    run(forks, CreationStarted(R, F, B), CreationConfirmed(B, R, F), ForkOffered(R, G, A, F))
    assert run(forks, ForkReceived(R, G, B, A, is_created=True)) == [SendForkRequest(B, R, G, is_created=True)]
    assert run(forks, HandleDropped(F)) == []
    assert run(forks, ForkConfirmed(B, R, G)) == [
        MarkConfirmed(G),
        SendUserDelete(B, R, F),
    ]


# -- owner to user and back


def test_a_fork_of_the_owner_is_counted_when_it_is_sent():
    forks = b()
    run(forks, ValueShared(OWN), ForkOffered(OWN, G, C, None))
    assert run(forks, OwnerHandleDropped(OWN)) == []
    assert run(forks, UserDeleted(OWN, G)) == [DropValue(OWN)]
    assert forks.is_idle


def test_a_fork_from_the_owner_is_confirmed_on_arrival():
    forks = c()
    assert run(forks, ForkReceived(OWN, G, B, B, is_created=True)) == []
    assert forks.users[G].state is UserState.CONFIRMED


def test_the_owner_accepts_its_own_rref_at_once():
    forks = b()
    run(forks, CreationArrived(R, F, A), CreationEnded(R))
    assert run(forks, ForkReceived(R, G, B, A, is_created=True)) == [SendChildAccept(A, G)]
    assert run(forks, UserDeleted(R, F)) == []
    assert run(forks, OwnerHandleDropped(R)) == [DropValue(R)]


def test_an_owner_that_sends_to_itself_counts_the_handle_not_the_fork():
    forks = b()
    run(forks, ValueShared(OWN), ForkOffered(OWN, G, B, None))
    assert run(forks, ForkReceived(OWN, G, B, B, is_created=True)) == []
    assert not forks.owned[OWN].forks
    assert run(forks, OwnerHandleDropped(OWN)) == []
    assert run(forks, OwnerHandleDropped(OWN)) == [DropValue(OWN)]


# -- what comes before its creation


def test_a_value_can_be_awaited_before_its_creation_arrives():
    forks = b()
    assert run(forks, ValueAwaited(R, is_created=False)) == [AwaitCreation(R)]
    assert run(forks, CreationArrived(R, F, A), CreationEnded(R)) == [RunCreation(R)]
    assert run(forks, OwnerHandleDropped(R)) == []
    assert run(forks, UserDeleted(R, F)) == [DropValue(R)]


def test_a_value_that_is_known_to_be_created_is_not_expected():
    forks = b()
    run(forks, ForkRequested(R, H, C, is_created=True), ValueAwaited(R, is_created=True))
    assert not forks.counts(R, H)
    assert forks.is_idle


def test_an_own_value_is_never_expected():
    forks = b()
    run(forks, ForkRequested(OWN, H, C, is_created=False))
    assert forks.is_idle


# -- offers nobody answers


def test_an_offer_that_never_arrived_lets_its_parent_go():
    forks = a()
    run(forks, CreationStarted(R, F, B), CreationConfirmed(B, R, F), ForkOffered(R, G, C, F), HandleDropped(F))
    assert run(forks, OfferKnown(G)) == []  # known, but perhaps not counted yet
    assert run(forks, OfferRefused(G)) == [SendUserDelete(B, R, F)]


def test_an_offer_of_the_owner_that_never_arrived_is_not_counted():
    forks = b()
    run(forks, ValueShared(OWN), ForkOffered(OWN, G, C, None), OwnerHandleDropped(OWN))
    assert run(forks, OfferRefused(G)) == [DropValue(OWN)]


def test_an_offer_of_the_owner_that_is_known_stays_counted():
    forks = b()
    run(forks, ValueShared(OWN), ForkOffered(OWN, G, C, None), OwnerHandleDropped(OWN), OfferKnown(G))
    assert not forks.offers
    assert run(forks, OfferRefused(G)) == []
    assert run(forks, UserDeleted(OWN, G)) == [DropValue(OWN)]


def test_a_fork_that_was_denied_is_not_taken_when_it_arrives_late():
    forks = c()
    run(forks, OfferQueried(G, A))
    assert forks.refuses(G)
    assert run(forks, ForkReceived(R, G, B, A, is_created=True)) == []
    assert not forks.knows(G)


def test_a_fork_that_is_known_is_not_denied():
    forks = c()
    run(forks, ForkReceived(R, G, B, A, is_created=True), OfferQueried(G, A))
    assert not forks.refuses(G)


# -- lost workers


def test_forks_of_a_lost_user_are_reclaimed():
    forks = b()
    run(forks, CreationArrived(R, F, A), CreationEnded(R), ForkRequested(R, H, C, is_created=True))
    assert run(forks, PeerLost(A)) == []
    assert run(forks, PeerLost(C)) == [DropValue(R)]


def test_users_of_a_lost_owner_are_marked_and_need_no_delete():
    forks = a()
    run(forks, CreationStarted(R, F, B), CreationConfirmed(B, R, F))
    assert run(forks, PeerLost(B)) == [MarkLost(F)]
    assert run(forks, HandleDropped(F)) == [ForgetFork(F)]
    assert forks.is_idle


def test_children_of_a_lost_worker_let_their_parents_go():
    forks = a()
    run(forks, CreationStarted(R, F, B), CreationConfirmed(B, R, F), ForkOffered(R, G, C, F), HandleDropped(F))
    assert run(forks, PeerLost(C)) == [SendUserDelete(B, R, F)]


def test_a_value_whose_creator_is_lost_is_not_expected_any_more():
    forks = b()
    run(forks, ForkRequested(R, H, C, is_created=False))
    (failed,) = run(forks, PeerLost(A))
    assert failed == FailValue(forks.owned[R], failed.reason)
    assert run(forks, ForkRequested(unique(0, 9), unique(2, 9), C, is_created=False)) == []
    assert unique(0, 9) not in forks.owned


def test_an_owner_that_returns_is_told_of_the_users_that_ended_meanwhile():
    forks = a()
    run(forks, CreationStarted(R, F, B), CreationConfirmed(B, R, F), PeerLost(B), HandleDropped(F))
    run(forks, OwnerUnreached(B, R, G))
    assert run(forks, PeerConnected(B)) == [
        SendUserDelete(B, R, F),
        SendUserDelete(B, R, G),
    ]
    assert run(forks, PeerConnected(B)) == []


def test_a_fork_that_is_counted_after_it_was_given_up_is_ended_again():
    forks = a()
    run(forks, CreationStarted(R, F, B), CreationFailed(F, 7, "cut"), PeerLost(B))
    assert run(forks, PeerConnected(B)) == [SendUserDelete(B, R, F)]
    # the news of the failure was sent again, and has overtaken that, or came later
    assert run(forks, FailureAcknowledged(B, R, F)) == [SendUserDelete(B, R, F)]
    assert run(forks, HandleDropped(F)) == [ForgetFork(F)]
    assert run(forks, FailureAcknowledged(B, R, F)) == [SendUserDelete(B, R, F)]
    forks = c()
    run(forks, ForkReceived(R, G, B, A, is_created=True), PeerLost(B), HandleDropped(G), PeerConnected(B))
    assert run(forks, ForkConfirmed(B, R, G)) == [SendUserDelete(B, R, G)]
    assert forks.is_idle


def test_a_fork_that_may_have_been_counted_after_it_was_given_up_is_ended_when_its_owner_returns():
    forks = c()
    run(forks, ForkReceived(R, G, B, A, is_created=True), PeerLost(B), HandleDropped(G), PeerConnected(B))
    assert run(forks, OwnerUnreached(B, R, G)) == []
    assert run(forks, PeerConnected(B)) == [SendUserDelete(B, R, G)]


def test_a_fork_in_use_is_not_ended_by_the_answer_that_counts_it():
    forks = c()
    run(forks, ForkReceived(R, G, B, A, is_created=True))
    assert run(forks, OwnerUnreached(B, R, G), PeerConnected(B)) == []
    assert run(forks, ForkConfirmed(B, R, G)) == [MarkConfirmed(G), SendChildAccept(A, G)]


def test_a_child_of_a_lost_owner_lets_its_parent_go():
    forks = c()
    run(forks, ForkReceived(R, G, B, A, is_created=True))
    assert run(forks, PeerLost(B)) == [MarkLost(G), SendChildAccept(A, G)]


# -- the tables


def test_a_user_that_nobody_holds_ends_with_its_owner():
    forks = a()
    run(forks, CreationStarted(R, F, B), HandleDropped(F))
    assert run(forks, PeerLost(B)) == [MarkLost(F), ForgetFork(F)]
    assert forks.is_idle


def test_a_user_of_a_lost_owner_is_kept_for_its_children():
    forks = a()
    run(forks, CreationStarted(R, F, B), ForkOffered(R, G, C, F), HandleDropped(F))
    assert run(forks, PeerLost(B)) == [MarkLost(F)]
    assert run(forks, ChildAccepted(G)) == [ForgetFork(F)]


def test_creations_of_a_worker_that_returned_are_expected_again():
    forks = b()
    run(forks, PeerLost(A), ForkRequested(R, G, C, is_created=False))
    assert not forks.counts(R, G)
    run(forks, PeerConnected(A), ForkRequested(R, G, C, is_created=False))
    assert forks.counts(R, G)


def test_a_fork_of_the_owner_needs_no_accept():
    forks = b()
    run(forks, ValueShared(OWN), ForkOffered(OWN, G, C, None))
    assert run(forks, ChildAccepted(G), OwnerHandleDropped(OWN)) == []
    assert forks.counts(OWN, G)


def test_who_stops_waiting_for_a_creation_that_never_comes_leaves_nothing_behind():
    forks = b()
    assert run(forks, ValueAwaited(R, is_created=False)) == [AwaitCreation(R)]
    assert run(forks, OwnerHandleDropped(R)) == [DropValue(R)]
    assert forks.is_idle


def test_what_was_abandoned_is_forgotten_with_its_creator():
    forks = b()
    run(forks, CreationAbandoned(R, F, A, "cut"))
    assert run(forks, PeerLost(A)) == [DropValue(R)]
    assert forks.is_idle


# -- workers that come back under their names


def test_an_owner_under_the_name_of_another_is_another():
    forks = a()
    run(forks, CreationStarted(R, F, B), CreationConfirmed(B, R, F))
    assert not forks.concerns(B_AGAIN)
    assert run(forks, PeerConnected(B_AGAIN), PeerLost(B_AGAIN)) == []
    assert forks.users[F].state is UserState.CONFIRMED
    assert run(forks, PeerLost(B)) == [MarkLost(F)]


def test_a_successor_is_a_user_of_what_its_predecessor_owned():
    forks = machine(B_AGAIN)
    assert run(forks, ForkReceived(R, G, B, A, is_created=False)) == [SendForkRequest(B, R, G, is_created=False)]
    assert not forks.owned
    assert run(forks, PeerLost(B)) == [MarkLost(G), SendChildAccept(A, G)]


def test_a_successor_does_not_hear_of_what_its_predecessor_counted():
    forks = a()
    run(forks, CreationStarted(R, F, B), CreationConfirmed(B, R, F), PeerLost(B), HandleDropped(F))
    assert run(forks, PeerConnected(B_AGAIN)) == []
    assert run(forks, PeerConnected(B)) == []  # and it is forgotten: a predecessor never comes back


def test_forks_of_a_predecessor_are_reclaimed_and_not_those_of_its_successor():
    forks = machine(C)
    mine = unique(2, 1)
    run(forks, ValueShared(mine), ForkOffered(mine, F, B, None), ForkOffered(mine, G, B_AGAIN, None))
    run(forks, PeerLost(B), OwnerHandleDropped(mine))
    assert (forks.counts(mine, F), forks.counts(mine, G)) == (False, True)


def test_an_owner_known_by_name_only_gets_its_id_with_the_connection():
    forks = a()
    run(forks, CreationStarted(R, F, SOME_B), PeerConnected(B), CreationConfirmed(B, R, F))
    assert run(forks, HandleDropped(F)) == [SendUserDelete(B, R, F)]


def test_how_many_lost_owners_are_remembered_is_limited(monkeypatch):
    monkeypatch.setattr("arpc.rref.forks._REMEMBERED_OWNERS", 2)
    forks = a()
    for number in range(5, 8):
        run(forks, OwnerUnreached(WorkerInfo(f"owner{number}", number), R, F))
    assert run(forks, PeerConnected(WorkerInfo("owner5", 5))) == []
    assert run(forks, PeerConnected(WorkerInfo("owner7", 7))) == [SendUserDelete(WorkerInfo("owner7", 7), R, F)]


def test_what_was_refused_is_forgotten_with_the_worker_it_came_from():
    forks = b()
    run(forks, OfferQueried(G, A), OfferQueried(H, C))
    run(forks, PeerLost(A))
    assert not forks.refuses(G)
    assert forks.refuses(H)


@pytest.mark.parametrize("event", [ForkRefused(F), ChildAccepted(F), OfferKnown(F), HandleDropped(F)])
def test_events_about_forks_that_have_ended_change_nothing(event):
    forks = a()
    assert run(forks, event) == []
    assert forks.is_idle


@pytest.mark.parametrize("kind", [CreationConfirmed, ForkConfirmed, FailureAcknowledged])
def test_an_owner_that_counts_a_fork_that_has_ended_is_told_so(kind):
    forks = a()
    assert run(forks, kind(B, R, F)) == [SendUserDelete(B, R, F)]
    assert forks.is_idle


@pytest.mark.parametrize("state", [UserState.CREATING, UserState.REQUESTED, UserState.CONFIRMED, UserState.FAILING])
def test_no_answer_of_an_owner_brings_back_a_user_that_was_lost(state):
    forks = a()
    user = {
        UserState.CREATING: [CreationStarted(R, F, B)],
        UserState.REQUESTED: [ForkReceived(R, F, B, C, is_created=True)],
        UserState.CONFIRMED: [CreationStarted(R, F, B), CreationConfirmed(B, R, F)],
        UserState.FAILING: [CreationStarted(R, F, B), CreationFailed(F, 7, "cut")],
    }[state]
    run(forks, *user)
    assert forks.users[F].state is state
    run(forks, PeerLost(B), CreationConfirmed(B, R, F), FailureAcknowledged(B, R, F), CreationFailed(F, 7, "cut"))
    run(forks, ForkConfirmed(B, R, F), ForkRefused(F), PeerLost(B))
    assert forks.users[F].state is UserState.LOST
