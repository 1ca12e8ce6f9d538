"""One suite for every communicator: the exchange, its agreement and its errors."""

import re

import pytest
import torch

from seqpar.comm import PeerError
from tests.comm import cases


class Exchanges:
    """The cases. A communicator's class says how to run them, with `size` ranks where it matters little."""

    size = 4
    # ranks, and tensors per pair at most, of the case with more messages than one round holds
    crowd_size, crowd_tensors = 4, 40

    def run(self, size, fn, *args, timeout=120.0):
        raise NotImplementedError

    @pytest.mark.parametrize("seed", range(3))
    def test_random_sparse_exchanges_equal_the_specification(self, seed):
        for wrong, counted, predicted, by_peer in self.run(self.size, cases.sparse, seed, 12):
            assert wrong == []
            assert counted == predicted
            assert by_peer

    def test_any_dtype_arrives(self):
        assert self.run(3, cases.of_all_types) == [[]] * 3

    def test_more_messages_than_a_round_holds(self):
        messages = cases.sent(1, 0, self.crowd_size, crowd=1.0, most=self.crowd_tensors)
        assert max(cases.size_of(cases.received(messages, r))[1] for r in range(self.crowd_size)) > 64
        results = self.run(self.crowd_size, cases.sparse, 1, 1, 1.0, self.crowd_tensors)
        for wrong, counted, predicted, _ in results:
            assert wrong == []
            assert counted == predicted

    def test_adjoint_is_the_exchange_with_roles_swapped(self):
        shares = self.run(self.size, cases.adjoint, 6)  # in which even two ranks have something to send
        forward, backward = (sum(share[i] for share in shares) for i in range(2))
        assert forward != 0
        assert forward == pytest.approx(backward, rel=1e-12)

    def test_subs_renumber_and_never_meet_their_parent(self):
        size = self.size
        for rank, (self_of_sub, sub_size, wrong, agreed, calls, got, sent) in enumerate(self.run(size, cases.subs)):
            assert self_of_sub == rank
            assert sub_size == len(range(rank % 2, size, 2))
            assert wrong == []
            assert agreed == (["evens"] if rank % 2 == 0 else [])
            assert calls == [0, 1, 0]
            assert got == [(rank - 1) % size] * 2
            assert sent >= 8

    def test_a_copy_is_the_comm_itself_and_pickle_names_its_class(self):
        for same, text in self.run(self.size, cases.copied):
            assert same
            assert re.search(r"^TypeError: a \w*Comm cannot be pickled: .* make another seqpar\.\w*Comm there$", text)

    def test_agree_returns_on_equal_facts(self):
        assert self.run(self.size, cases.agree, "attention", [8] * self.size, {}) == [None] * self.size

    def test_agree_names_who_differs_and_how(self):
        by_rank = [8] * (self.size - 1) + [4]
        for message in self.run(self.size, cases.agree, "attention", by_rank, {}):
            assert message.startswith("ValueError: attention: ranks differ in heads: 8 on rank")
            assert f"4 on rank {self.size - 1}" in message
            assert "dim" not in message

    def test_agree_quotes_the_error_of_one_rank_everywhere(self):
        messages = self.run(self.size, cases.agree, "attention", [8] * self.size, {1: "q is a list"})
        assert messages[1] == "TypeError: q is a list"
        for rank in {*range(self.size)} - {1}:
            assert messages[rank] == "ValueError: attention: rank 1 refused its arguments: TypeError: q is a list"

    @pytest.mark.parametrize("most", [3, 3000])  # what goes along with the first message, and what does not
    def test_gather_returns_every_ranks_value(self, most):
        sizes = [most * rank for rank in range(self.size)]
        for rank, (found, of_sub, sent) in enumerate(self.run(self.size, cases.gather, sizes, {})):
            assert found == [list(range(n)) for n in sizes]
            assert of_sub == [r for r in reversed(range(self.size)) if r % 2 == rank % 2]
            assert sent == 0

    def test_gather_quotes_the_error_of_one_rank_everywhere(self):
        for rank, (found, _, _) in enumerate(self.run(self.size, cases.gather, [1] * self.size, {1: "no lengths"})):
            quoted = "" if rank == 1 else "ValueError: lengths: rank 1 refused its arguments: "
            assert found == quoted + "TypeError: no lengths"

    def test_what_one_rank_cannot_tell_is_its_error_everywhere(self):
        words = ["pickle.*lambda", "KeyError: 'no words'", "KeyError: 'no words'"]
        for rank, found in enumerate(self.run(self.size, cases.untold)):
            quoted = "" if rank == 1 else "^ValueError: (lengths|attention): rank 1 refused its arguments: .*"
            assert len(found) == 4 and "Wordless" in found.pop()
            assert all(re.search(quoted + text, message) for text, message in zip(words, found, strict=True)), found

    def test_gather_compares_facts_as_agree_does(self):
        for found, message in self.run(self.size, cases.gather_with_facts):
            assert found == [*range(self.size)]
            assert message.startswith("a forward: ranks differ in heads: 8 on rank")
            assert f"4 on rank {self.size - 1}" in message

    def test_arguments_are_refused_before_anything_moves(self):
        for rank, (found, exchanges) in enumerate(self.run(self.size, cases.refused)):
            assert len(found) == 8
            assert f"rank {rank} of {self.size} cannot send to rank {rank}" in found[0]
            assert f"cannot send to rank {self.size}" in found[1]
            assert "call .contiguous()" in found[2]
            assert all("without memory of its own; expected a copy in plain memory" in text for text in found[3:5])
            assert all("expected distinct ranks" in message for message in found[5:])
            assert exchanges == 0

    def errors(self, folder, fn, *args):
        """Runs a failing case on 3 ranks, not until the timeout: (raised, {rank: seconds}, {rank: message})."""
        with pytest.raises(Exception) as raised:
            self.run(3, cases.witness, folder, fn, *args)
        texts = {int(path.name): path.read_text().split(" ", 1) for path in folder.iterdir()}
        assert sorted(texts) == [0, 1, 2]
        assert not any("waited 120 s" in message for _, message in texts.values())
        return raised.value, {r: float(t[0]) for r, t in texts.items()}, {r: t[1] for r, t in texts.items()}

    def test_a_dropped_work_kills_the_comm_and_says_so(self, tmp_path):
        raised, _, messages = self.errors(tmp_path, "drops")
        assert isinstance(raised, PeerError)
        for message in messages.values():
            assert "rank 0: dropped the work of call 3 phase 1 stage 4" in message

    def test_different_tags_name_both_ranks_and_both_tags(self, tmp_path):
        raised, _, messages = self.errors(tmp_path, "other_tag")
        assert isinstance(raised, PeerError)
        for message in messages.values():
            assert "ranks 0 and 1 make different calls" in message
            assert re.search("rank 0 .*call 7 phase 0 stage 2 with plan 5eed.*rank 1 .*call 7 phase 0 stage 5", message)

    def test_tags_of_a_sub_are_not_its_parents(self, tmp_path):
        _, _, messages = self.errors(tmp_path, "other_scope")
        for message in messages.values():
            assert "ranks 0 and 1 make different calls" in message
            assert re.search(r"among ranks \[0, 1\]|in sub [0-9a-f]+", message)

    @pytest.mark.parametrize(
        ("shapes", "dtypes"),
        [
            (((3,), (4,)), (torch.float32,) * 2),
            (((2, 2), (4,)), (torch.float32,) * 2),
            (((2,), (2,)), (torch.int32, torch.float32)),
        ],
        ids=["bytes", "shape", "dtype"],
    )
    def test_different_tensors_name_the_pair(self, tmp_path, shapes, dtypes):
        _, _, messages = self.errors(tmp_path, "other_shape", shapes, dtypes)
        for message in messages.values():
            assert "PeerError" in message
            assert re.search("rank 0 (sends|sent) .*rank 1,? .*(expected|receives)", message)

    def test_a_peer_that_never_sends_is_named_after_the_timeout(self, tmp_path):
        raised, seconds, messages = self.errors(tmp_path, "never_sends", tmp_path, 1.0)
        assert isinstance(raised, PeerError)
        assert all("root cause" in m or "waited 1 s" in m for m in messages.values())
        assert "waited 1 s" in messages[0] + messages[1]
        assert not re.search("slot|epoch", messages[0] + messages[1])
        assert re.search("for rank 2", messages[1])
        assert max(seconds[0], seconds[1]) > 0.9

    def test_a_rank_that_never_agrees_is_named_after_the_timeout(self, tmp_path):
        _, seconds, messages = self.errors(tmp_path, "never_agrees", tmp_path, 1.0)
        for rank in (0, 1):
            # threads share one timeout, and rank 0 may then be the first to give up
            assert re.search(r"waited 1 s .*rank(s \[(1, )?| )2", messages[rank])
        assert max(seconds[0], seconds[1]) > 0.9

    def test_a_second_thread_is_refused_while_a_call_runs(self, tmp_path):
        raised, _, messages = self.errors(tmp_path, "two_threads", tmp_path)
        assert type(raised) is RuntimeError, (raised, messages)
        for message in messages.values():
            assert re.search("rank 0: second in thread '.*' while thread 'loader' is inside first", message)

    def test_a_gather_beside_an_agreement_names_both_calls(self, tmp_path):
        raised, _, messages = self.errors(tmp_path, "gathers_beside")
        assert isinstance(raised, (PeerError, ValueError))
        for message in messages.values():
            assert re.search("ranks .*(make different calls|differ in the call)", message)
            assert "lengths" in message and "attention" in message

    def test_the_first_failure_is_the_root_cause_that_all_quote(self, tmp_path):
        with pytest.raises(KeyError, match="no such layer"):
            self.run(3, cases.witness, tmp_path, "aborts")
        for rank in (0, 1):
            assert "root cause: rank 2: KeyError: 'no such layer'" in (tmp_path / str(rank)).read_text()
