"""Training programs for `seqpar.testing.compare`: a right loop, and others that replace one of its parts.

`RIGHT` computes on several ranks what it computes on one. `WRONG` has the mistakes that raise nothing; `seen` is a loss
or a parameter by which each is found.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.comm import Comm
from seqpar.data import prefetch
from seqpar.train import all_sum, clip_grad_norm, cross_entropy, sync_gradients, token_mean

VOCABULARY, DIM, HEADS = 19, 8, 2
RIGHT: dict[str, type[Loop]] = {}
WRONG: dict[str, type[Loop]] = {}


class Decoder(nn.Module):
    """One layer of causal attention, with positions as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(64, DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.hidden(tokens, positions))

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What the head reads."""
        x = self.mixed(self.tokens(tokens) + self.places(positions))
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        return x + self.out(self.attend(q, k, v).transpose(-2, -3).flatten(-2))

    def mixed(self, x: Tensor) -> Tensor:
        """Before attention."""
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention, heads before rows."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Loop:
    """Documents that every rank has whole, plain PyTorch under `parallelize`, shares of the loss, summed gradients."""

    dtype, rate, lengths = torch.float64, 1e-2, [13, 6]
    steps, processes, seen = 2, False, ""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __init_subclass__(cls, abstract: bool = False) -> None:
        if not abstract:
            (WRONG if cls.seen else RIGHT)[cls.__name__] = cls

    def train(self) -> Iterator[tuple[nn.Module, Tensor]]:
        torch.manual_seed(0)
        model = self.model().to(self.dtype)
        wrapped = self.parallel(model)
        optimizer = self.optimizer(model)
        for step in range(self.steps):
            generator = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            loss = self.backward(wrapped, generator)
            self.sum(model)
            self.clip(model)
            optimizer.step()
            yield wrapped, self.reported(loss.detach())

    def model(self) -> nn.Module:
        return Decoder()

    def parallel(self, model: nn.Module) -> nn.Module:
        seqpar.parallelize(model, self.comm, sdpa=True)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.rate)

    def data(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens and labels of all documents."""
        several = [
            torch.randint(VOCABULARY, (n + 1,), generator=generator).cumsum(0) % VOCABULARY for n in self.lengths
        ]
        return torch.cat([x[:-1] for x in several]), torch.cat([x[1:] for x in several])

    def plan(self) -> seqpar.Plan:
        return seqpar.Plan(seqpar.Mask(self.lengths), seqpar.Layout.zigzag(self.lengths, self.comm.size))

    def rows(self, plan: seqpar.Plan, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return seqpar.shard(tokens, plan, self.comm.rank), seqpar.shard(labels, plan, self.comm.rank)

    def positions(self, plan: seqpar.Plan) -> Tensor:
        return torch.from_numpy(plan.rope_positions(self.comm.rank))

    def backward(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        tokens, labels = self.data(generator)
        plan = self.plan()
        tokens, labels = self.rows(plan, tokens, labels)
        loss = self.loss(model, self.forward(model, plan, tokens), labels)
        loss.backward()
        return loss

    def forward(self, model: nn.Module, plan: seqpar.Plan, tokens: Tensor) -> Tensor:
        with seqpar.parallel(plan, self.comm):
            return model(tokens[None], self.positions(plan)[None])[0]

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, valid=sum(self.lengths))

    def sum(self, model: nn.Module) -> None:
        sync_gradients(model.parameters(), self.comm)

    def clip(self, model: nn.Module) -> None:
        pass

    def reported(self, loss: Tensor) -> Tensor:
        return all_sum(loss, self.comm)


def train(loop: type[Loop], comm: Comm) -> Iterator[tuple[nn.Module, Tensor]]:
    """The program of a loop, which processes can import."""
    return loop(comm).train()


class Bare(Loop, abstract=True):
    """A loop without `parallelize`, whose attention asks for the plan around it."""

    def model(self) -> nn.Module:
        return BareDecoder()

    def parallel(self, model: nn.Module) -> nn.Module:
        return model


class BareDecoder(Decoder):
    """As `Decoder`, with a layer of seqpar."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = seqpar.nn.Attention()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(*(x[0].transpose(0, 1) for x in (q, k, v))).transpose(0, 1)[None]


class Alone(Bare, abstract=True):
    """As many documents as ranks or more, each on one rank, so that ranks do not meet in a forward."""

    lengths = [9, 8, 9, 8]

    def plan(self) -> seqpar.Plan:
        each = sum(self.lengths) // self.comm.size
        return seqpar.Plan(
            seqpar.Mask(self.lengths), seqpar.Layout.contiguous(sum(self.lengths), self.comm.size), rows=each
        )


class Wrapped(Bare, abstract=True):
    """Processes, and a wrapper that averages gradients over them."""

    processes, steps, factor = True, 1, True

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels, reduction="sum") / sum(self.lengths)
        return loss * self.comm.size if self.factor else loss

    def sum(self, model: nn.Module) -> None:
        pass

    def reported(self, loss: Tensor) -> Tensor:
        return super().reported(loss) / (self.comm.size if self.factor else 1)


class Replicas(Wrapped, abstract=True):
    """DDP."""

    def parallel(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)


class Shards(Wrapped, abstract=True):
    """FSDP2."""

    def parallel(self, model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=init_device_mesh("cpu", (self.comm.size,)))


class Llama(Loop, abstract=True):
    """A transformers model, for which each rank brings documents of its own."""

    lengths, source = [11, 5, 8, 7], "sharded"

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": DIM, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": HEADS}
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))

    def parallel(self, model: nn.Module) -> nn.Module:
        seqpar.parallelize(model, self.comm, source=self.source, logits=True)
        return model

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, a mask and labels that belong to their own tokens, of this rank's documents."""
        ids = torch.randint(VOCABULARY, (len(self.lengths), max(self.lengths)), generator=generator)
        mask = torch.arange(ids.shape[1]) < torch.tensor(self.lengths)[:, None]
        mine = slice(self.comm.rank, None, self.comm.size) if self.source == "sharded" else slice(None)
        return ids[mine], mask[mine].long(), ids.masked_fill(~mask, -100)[mine]

    def backward(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        ids, mask, labels = self.batch(generator)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        return loss

    def reported(self, loss: Tensor) -> Tensor:
        return loss


def predicted(logits: Tensor, labels: Tensor, how: str) -> Tensor:
    """Cross entropy of the next tokens, "sum" or "mean"."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=how)


class Plain(Loop):
    pass


class Single(Loop):
    dtype, steps = torch.float32, 3


class Half(Loop):
    dtype = torch.bfloat16

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.rate)


class Ulysses(Bare):
    def plan(self) -> seqpar.Plan:
        layout = seqpar.Layout.contiguous(sum(self.lengths), self.comm.size)
        return seqpar.Plan(seqpar.Mask(self.lengths), layout, ulysses=self.comm.size)


class Encoder(Loop):
    def model(self) -> nn.Module:
        return EncoderModel()

    def plan(self) -> seqpar.Plan:
        mask = seqpar.Mask(self.lengths, causal=False)
        return seqpar.Plan(mask, seqpar.Layout.zigzag(self.lengths, self.comm.size))


class EncoderModel(Decoder):
    """As `Decoder`, with tokens that see both sides."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Pads(Loop):
    def plan(self) -> seqpar.Plan:
        layout, rows = seqpar.Layout.zigzag(self.lengths, self.comm.size), sum(self.lengths) // self.comm.size
        return seqpar.Plan(seqpar.Mask(self.lengths), layout, rows=rows + 3 * (self.comm.size > 1))

    def rows(self, plan: seqpar.Plan, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        tokens, labels = super().rows(plan, tokens, labels)
        pads = torch.arange(len(labels)) >= plan.layout.tokens(self.comm.rank)
        return tokens, labels.masked_fill(pads, -100)

    def positions(self, plan: seqpar.Plan) -> Tensor:
        return super().positions(plan).clamp_min(0)


class BareSdpa(Bare):
    def model(self) -> nn.Module:
        return Decoder()

    def forward(self, model: nn.Module, plan: seqpar.Plan, tokens: Tensor) -> Tensor:
        with seqpar.sdpa(plan, self.comm):
            return model(tokens[None], self.positions(plan)[None])[0]


class ClippedAfterTheSum(Loop):
    def clip(self, model: nn.Module) -> None:
        clip_grad_norm(model.parameters(), 0.1)


class PenaltyOnce(Loop):
    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(model, logits, labels) + model.head.weight.square().sum() / self.comm.size


class Balance(Loop):
    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        chances = logits.softmax(-1)
        balance = (token_mean(chances, self.comm) * token_mean(chances.square(), self.comm)).sum()
        return super().loss(model, logits, labels) + balance / self.comm.size


class Counting(Decoder):
    """As `Decoder`, with logits that a saved buffer shifts, and a cache that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(VOCABULARY))
        self.register_buffer("last", torch.zeros(0), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.last = tokens.double()
        return super().forward(tokens, positions) + self.shift


class BufferOfAllTokens(Loop):
    def model(self) -> nn.Module:
        return Counting()

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            model.shift -= token_mean(logits.softmax(-1), self.comm)
        return super().loss(model, logits, labels)


class Accumulated(Loop):
    def backward(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        return sum(super(Accumulated, self).backward(model, generator) for _ in range(2))


class Tied(Bare):
    def model(self) -> nn.Module:
        model = BareDecoder()
        model.head.weight = model.tokens.weight
        return model


class Shifted(Loop):
    def rows(self, plan: seqpar.Plan, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        tokens, _ = super().rows(plan, tokens, labels)
        return tokens, seqpar.recurrent.shift(tokens + 1, plan, self.comm, by=-1) - 1

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels.masked_fill(labels < 0, -100), valid=sum(self.lengths) - len(self.lengths))


class Recurrent(Bare):
    def forward(self, model: nn.Module, plan: seqpar.Plan, tokens: Tensor) -> Tensor:
        x = model.tokens(tokens)
        q, k, v = model.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
        return model.head(x + seqpar.recurrent.linear_attention(q, k, v, plan, self.comm).flatten(1))


class OfALoader(Bare):
    """Each rank's loader brings documents of its own."""

    def backward(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        tokens, _ = self.data(generator)
        mine = tokens.split(self.lengths)[self.comm.rank :: self.comm.size]
        for part in prefetch([{"input_ids": list(mine), "labels": list(mine)}], self.comm):
            with seqpar.parallel(part.plan, self.comm):
                logits = model(part.tensors["input_ids"][None], part.positions[None])[0]
            loss = cross_entropy(logits, part.tensors["labels"], valid=part.valid)
            loss.backward()
        return loss


class LlamaWithLabels(Llama):
    pass


class LlamaReplicated(Llama):
    source = "replicated"

    def backward(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        ids, mask, labels = self.batch(generator)
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = predicted(logits, labels, "mean")
        (loss / self.comm.size).backward()
        return loss


class LlamaOwnLoss(Llama):
    def backward(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        ids, mask, labels = self.batch(generator)
        logits = model(input_ids=ids, attention_mask=mask).logits
        count = all_sum((labels[:, 1:] != -100).sum(), self.comm)
        loss = predicted(logits, labels, "sum") / count
        loss.backward()
        return loss

    def reported(self, loss: Tensor) -> Tensor:
        return all_sum(loss, self.comm)


class DDP(Replicas):
    pass


class FSDP2(Shards):
    pass


class OtherDocuments(Loop):
    seen = "head.weight"

    def data(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        generator.manual_seed(self.comm.rank)
        return super().data(generator)


class PositionsFromZero(Loop):
    seen = "places.weight"

    def positions(self, plan: seqpar.Plan) -> Tensor:
        return torch.arange(plan.rows(self.comm.rank))


class LabelsShiftedAfterShard(Loop):
    seen = "loss"

    def rows(self, plan: seqpar.Plan, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        tokens, _ = super().rows(plan, tokens, labels)
        return tokens, torch.cat([tokens[1:], torch.tensor([-100])])


class LlamaCutByHand(Llama):
    seen, lengths = "model.embed_tokens.weight", [12, 12]

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.randint(VOCABULARY, (2, 12), generator=generator).chunk(self.comm.size, 1)[self.comm.rank]
        return ids, torch.ones_like(ids), ids


class PadsWithLabels(Pads):
    seen = "head.bias"

    def rows(self, plan: seqpar.Plan, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return Loop.rows(self, plan, tokens, labels)


class OwnValid(Loop):
    seen = "loss"

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, valid=int((labels != -100).sum()))


class MeanOfOwnRows(Loop):
    seen = "head.weight"

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class LlamaReplicatedWhole(Llama):
    seen, source = "model.norm.weight", "replicated"

    def backward(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        ids, mask, labels = self.batch(generator)
        loss = predicted(model(input_ids=ids, attention_mask=mask).logits, labels, "mean")
        loss.backward()
        return loss


class LossInTheForward(Bare):
    seen = "out.bias"

    def model(self) -> nn.Module:
        return WithLoss()

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.squeeze()


class WithLoss(BareDecoder):
    """Its output is a mean over the rows that it got."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits = super().forward(tokens, positions)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())[None, None]


class PenaltyPerRank(Loop):
    seen = "head.weight"

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(model, logits, labels) + model.head.weight.square().sum()


class BalancePerRank(Loop):
    seen = "loss"

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        chances = logits.softmax(-1)
        balance = (chances.mean(0) * chances.square().mean(0)).sum()
        return super().loss(model, logits, labels) + balance / self.comm.size


class BufferOfOwnTokens(Loop):
    seen, steps = "shift", 1

    def model(self) -> nn.Module:
        return Counting()

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            model.shift -= logits.softmax(-1).mean(0)
        return super().loss(model, logits, labels)


class AdvantagesPerRank(Loop):
    seen = "head.weight"

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        reward = labels.double() - labels.double().mean()
        return (reward * -logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]).sum() / sum(self.lengths)


class OwnShareReported(Loop):
    seen = "loss"

    def reported(self, loss: Tensor) -> Tensor:
        return loss


class DDPWithoutFactor(Replicas):
    seen, factor = "tokens.weight", False


class FSDP2WithoutFactor(Shards):
    seen, factor = "tokens.weight", False


class DDPAndSum(Replicas):
    seen = "qkv.bias"

    def sum(self, model: nn.Module) -> None:
        sync_gradients(model.parameters(), self.comm)


class ClippedBeforeTheSum(Loop):
    seen = "qkv.bias"

    def sum(self, model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        super().sum(model)


class ZeroedOnARank(Loop):
    seen = "qkv.weight"

    def sum(self, model: nn.Module) -> None:
        for p in model.parameters():
            if self.comm.rank == 1:
                p.grad.zero_()
        super().sum(model)


class BackwardLeftOut(Alone):
    seen = "head.bias"

    def backward(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        loss = super().backward(model, generator)
        if self.comm.rank == 0:
            return loss + super().backward(model, generator)
        tokens, labels = self.rows(self.plan(), *self.data(generator))
        return loss + self.loss(model, self.forward(model, self.plan(), tokens), labels)


class SumForgotten(Bare):
    seen = "tokens.weight"

    def sum(self, model: nn.Module) -> None:
        pass


class SumDividedByRanks(Loop):
    seen = "head.weight"

    def clip(self, model: nn.Module) -> None:
        for p in model.parameters():
            p.grad /= self.comm.size


class OtherSeeds(Bare):
    seen = "tokens.weight"

    def model(self) -> nn.Module:
        torch.manual_seed(self.comm.rank)
        return BareDecoder()


class RateByRanks(Loop):
    seen = "out.weight"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.rate * self.comm.size)


class EachAlone(Llama):
    """Every process has a `LocalComm()` in a loop of its own."""

    seen = "lm_head.weight"

    def parallel(self, model: nn.Module) -> nn.Module:
        seqpar.parallelize(model, seqpar.LocalComm(), logits=True)
        return model

    def sum(self, model: nn.Module) -> None:
        sync_gradients(model.parameters(), seqpar.LocalComm())


class CallsInAnotherOrder(Bare):
    seen, lengths = "head.weight", [12]

    def forward(self, model: nn.Module, plan: seqpar.Plan, tokens: Tensor) -> Tensor:
        both = [tokens, (tokens + 1) % VOCABULARY]
        halves = both if self.comm.rank == 0 else both[::-1]
        found = [super(CallsInAnotherOrder, self).forward(model, plan, half) for half in halves]
        return found[0] - 2 * found[1] if self.comm.rank == 0 else found[1] - 2 * found[0]


class PartOutsideOfTheForward(Loop):
    seen = "out.weight"

    def forward(self, model: nn.Module, plan: seqpar.Plan, tokens: Tensor) -> Tensor:
        with seqpar.parallel(plan, self.comm):
            positions = self.positions(plan)[None]
            return (model(tokens[None], positions) + model.head(model.hidden(tokens[None], positions)))[0]


class Mixing(Bare, abstract=True):
    """A model that computes something else of the rows before attention."""

    def model(self) -> nn.Module:
        model = BareDecoder()
        model.mixed = self.mixed
        return model

    def mixed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class BatchNorm(Mixing):
    seen = "places.weight"

    def mixed(self, x: Tensor) -> Tensor:
        return F.batch_norm(x[0], None, None, training=True)[None]


class DropoutByRows(Mixing):
    seen = "loss"

    def mixed(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)


class Convolution(Mixing):
    seen = "tokens.weight"

    def mixed(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


class BackwardOverRows(Mixing):
    seen = "tokens.weight"

    def mixed(self, x: Tensor) -> Tensor:
        return Normed.apply(x)


class Normed(torch.autograd.Function):
    """The identity, whose gradient is divided by its norm over all rows."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()
