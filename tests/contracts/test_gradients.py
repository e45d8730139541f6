import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from tests.contracts.small import checked
from workbench.contracts import gradients
from workbench.contracts.check import CONTRACTS, all_results, show_progress
from workbench.contracts.observer import Observer
from workbench.contracts.results import Status

VOCAB = 8
FAILED, PASSED, UNKNOWN = Status.FAILED, Status.PASSED, Status.NOT_TESTED


class Net(nn.Module):
    """A tiny model of tokens, whose parts can be left out."""

    def __init__(self, middle=None, use=lambda net, x: net.middle(x)):
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(VOCAB, 6)
        self.middle = middle or nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCAB)
        self.use = use

    def forward(self, ids):
        return self.head(self.use(self, self.emb(ids)))


def batches(n, sizes=(4,)):
    generator = torch.Generator().manual_seed(0)
    for i in range(n):
        ids = torch.randint(0, VOCAB, (2, 9), generator=generator)
        labels = ids[:, 1:].clone()
        labels[:, sizes[i % len(sizes)] :] = -100
        yield ids[:, :-1], labels


def loss_of(model, ids, labels, reduction="mean"):
    return functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction=reduction)


@pytest.fixture(autouse=True)
def only_these(monkeypatch):
    mine = {id: function for id, function in CONTRACTS.items() if function.__module__ == gradients.__name__}
    monkeypatch.setattr("workbench.contracts.lab.CONTRACTS", mine)


def results(loop, n_updates=5):
    found = {}
    with Observer(
        n_updates, lambda seen: found.update({each.id: each for each in all_results(seen, (), show_progress(False))})
    ) as seen:
        seen.sees_all = True
        loop()
        seen.finish()
    return found


def trained(model, parameters=None, n=5, *, loss=loss_of, rate=0.1, clears=True):
    def loop():
        optimizer = torch.optim.SGD(parameters or model.parameters(), lr=rate)
        for ids, labels in batches(n):
            loss(model, ids, labels).backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()

    return results(loop, n)


def accumulated(scale, n_micro=2, sizes=(4,), cleared_inside=False, reduction="mean"):
    model = Net()

    def loop():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        all_batches = list(batches(5 * n_micro, sizes))
        for i in range(5):
            optimizer.zero_grad()
            mine = all_batches[i * n_micro : (i + 1) * n_micro]
            n_labels = sum(int((labels != -100).sum()) for _, labels in mine)
            for ids, labels in mine:
                if cleared_inside:
                    optimizer.zero_grad()
                (loss_of(model, ids, labels, reduction) * scale(n_labels)).backward()
            optimizer.step()

    return results(loop)


def test_a_sound_training_keeps_all():
    found = trained(Net())
    for id in ("modules_used", "gradients_reach_all", "gradients_cleared", "accumulation"):
        assert found[id].status is PASSED, found[id]
    for id in ("weights_tied", "recompute", "compiled_equals_eager", "balance_loss"):
        assert found[id].status is Status.NOT_APPLICABLE, found[id]


def test_a_module_that_is_never_called_is_named():
    found = trained(Net(use=lambda net, x: x))["modules_used"]
    assert found.status is FAILED
    assert found.where == "middle"


def test_a_norm_that_is_never_called_is_named_beside_others_of_its_kind():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.LayerNorm(6), nn.LayerNorm(6)

        def forward(self, x):
            return self.before(x)

    found = trained(Net(Normed()))["modules_used"]
    assert (found.status, found.where) == (FAILED, "middle.after")


def test_weights_of_functional_calls_are_used():
    net = Net(use=lambda net, x: functional.linear(x, net.middle.weight, net.middle.bias))
    found = trained(net)
    assert found["modules_used"].status is PASSED
    assert found["gradients_reach_all"].status is PASSED


def test_a_cut_graph_is_found_where_it_is_cut():
    found = trained(Net(use=lambda net, x: net.middle(x).detach() + x.detach()))["gradients_reach_all"]
    assert found.status is FAILED
    assert "although the loss changes" in found.evidence
    assert "emb" in found.where
    assert "head" not in found.where


class Returning(Net):
    """A model that returns an output that no loss uses."""

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(x), self.middle(x)


def test_an_output_without_a_loss_may_be_on_purpose():
    def loss(model, ids, labels):
        return functional.cross_entropy(model(ids)[0].flatten(0, 1), labels.flatten())

    found = trained(Returning(), loss=loss)
    assert found["gradients_reach_all"].status is UNKNOWN
    assert "middle.weight" in found["gradients_reach_all"].where
    assert found["modules_used"].status is PASSED


class Expert(nn.Linear):
    pass


def test_an_expert_without_a_token_is_no_failure():
    experts = nn.ModuleList(Expert(6, 6) for _ in range(2))
    found = trained(Net(experts, use=lambda net, x: net.middle[0](x)))
    assert found["modules_used"].status is UNKNOWN
    assert found["gradients_reach_all"].status is not FAILED


def test_lower_blocks_of_a_stack_that_are_cut_off():
    blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    found = trained(Net(blocks, use=lambda net, x: blocks[2](blocks[1](x).detach())))["gradients_reach_all"]
    assert found.status is FAILED
    assert "middle.1" in found.where


class Targets(nn.Module):
    """A module with a copy that is compared with, as in learning by temporal differences."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            goal = self.target(x)
        return self.online(x) - goal


def test_a_target_without_gradients_is_no_failure():
    assert trained(Net(Targets()))["gradients_reach_all"].status is UNKNOWN


def test_frozen_parts_are_no_failure():
    model = Net()
    model.emb.requires_grad_(False)
    found = trained(model, [p for p in model.parameters() if p.requires_grad])
    assert found["gradients_reach_all"].status is PASSED
    assert found["modules_used"].status is PASSED


class Factors(nn.Module):
    """A product of two matrices that are both 0."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(2, 6))

    def forward(self, x):
        return x + x @ self.a @ self.b


def test_a_saddle_that_cannot_be_left():
    found = trained(Net(Factors()))["gradients_reach_all"]
    assert found.status is FAILED
    assert "exactly 0" in found.evidence
    assert "middle.a, middle.b" in found.where


def test_the_experiment_restores_every_bit():
    norm = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(6, 6))
    model = Net(norm, use=lambda net, x: net.middle(x).detach() + x.detach())
    kept = {}

    def ready(seen):
        before = {name: p.detach().clone() for name, p in model.state_dict().items()}
        gradients = {name: p.grad for name, p in model.named_parameters()}
        state = torch.get_rng_state()
        kept["results"] = all_results(seen, (), show_progress(False))
        assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
        assert all(gradients[name] is p.grad for name, p in model.named_parameters())
        assert torch.equal(state, torch.get_rng_state())

    with Observer(5, ready) as seen:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for ids, labels in batches(5):
            loss_of(model, ids, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.finish()
    assert any(each.status is FAILED for each in kept["results"])


def gpt2():
    config = GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=1, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def loss_of_logits(model, ids, labels):
    logits = model(input_ids=ids, labels=ids).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def own_loss(model, ids, labels):
    return model(input_ids=ids, labels=ids).loss


def test_tied_weights():
    assert trained(gpt2(), n=3, loss=own_loss)["weights_tied"].status is PASSED
    model = gpt2()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    found = trained(model, n=3, loss=own_loss)["weights_tied"]
    assert found.status is FAILED
    assert "lm_head.weight" in found.where


def test_means_of_equal_micro_batches_have_the_right_weight():
    assert accumulated(lambda n: 1 / 2)["accumulation"].status is PASSED
    assert accumulated(lambda n: 1 / n, sizes=(2, 7), reduction="sum")["accumulation"].status is PASSED


@pytest.mark.parametrize(
    ("scale", "options", "words", "proof"),
    [
        (lambda n: 1.0, {}, "add up to 2", "The norm of the gradient"),
        (lambda n: 1 / n / 2, {"sizes": (2, 7), "reduction": "sum"}, "add up to 0.5", "The norm of the gradient"),
        (lambda n: 1 / 2, {"sizes": (2, 7)}, "3.5 times", "% of its norm"),
    ],
)
def test_a_sum_of_means_one_that_is_divided_again_and_a_mean_of_means(scale, options, words, proof):
    found = accumulated(scale, **options)["accumulation"]
    assert found.status is FAILED
    assert words in found.evidence
    assert proof in found.proof


def test_an_optimizer_that_asks_for_its_loss_twice_accumulates_nothing():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loop():
        for ids, labels in batches(5):

            def closure(ids=ids, labels=labels):
                optimizer.zero_grad()
                loss = loss_of(model, ids, labels)
                loss.backward()
                return loss

            optimizer.step(closure)

    assert results(loop)["accumulation"].status is Status.NOT_APPLICABLE


def test_two_losses_of_one_update_may_be_added():
    model = Net()

    def loop():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = list(batches(10))
        for one, two in zip(given[::2], given[1::2], strict=True):
            optimizer.zero_grad()
            loss_of(model, *one).backward()
            loss_of(model, *two).backward()
            optimizer.step()

    assert results(loop)["accumulation"].status is Status.NOT_APPLICABLE


def test_gradients_that_are_cleared_in_each_micro_batch():
    found = accumulated(lambda n: 1 / 2, cleared_inside=True)["gradients_cleared"]
    assert found.status is FAILED
    assert "5 of 10 passes" in found.evidence
    # Without a division it may be on purpose, as of an attack that looks for inputs first.
    assert accumulated(lambda n: 1.0, cleared_inside=True)["gradients_cleared"].status is UNKNOWN


def test_gradients_that_are_never_cleared():
    found = trained(Net(), rate=0.01, clears=False)["gradients_cleared"]
    assert found.status is FAILED
    assert "4 of 4 updates" in found.evidence


def adversarial(clear_first):
    torch.manual_seed(0)
    g, d = nn.Linear(2, 2), nn.Linear(2, 2)

    def loop():
        of_g, of_d = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)
        for _ in range(6):
            fake, target = g(torch.randn(8, 2)), torch.arange(8) % 2
            if clear_first:
                d.zero_grad()
            functional.cross_entropy(d(fake.detach()), target).backward()
            of_d.step()
            g.zero_grad()
            functional.cross_entropy(d(fake), 1 - target).backward()
            of_g.step()

    return results(loop, 4)["gradients_cleared"]


def test_an_adversary_may_discard_gradients_but_not_keep_them():
    assert adversarial(True).status is PASSED
    assert adversarial(False).status is FAILED


class Checkpointed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner, self.options = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 6)), options

    def forward(self, x):
        return checkpoint(self.inner, x, **self.options)


def test_checkpointing_with_and_without_random_states():
    assert trained(Net(Checkpointed(use_reentrant=False)))["recompute"].status is PASSED
    found = trained(Net(Checkpointed(use_reentrant=False, preserve_rng_state=False)))["recompute"]
    assert found.status is FAILED
    assert "middle.inner" in found.where


def test_reentrant_checkpointing_after_a_frozen_embedding():
    model = Net(Checkpointed(use_reentrant=True))
    model.emb.requires_grad_(False)
    found = trained(model)
    assert found["recompute"].status is FAILED
    assert "use_reentrant=False" in found["gradients_reach_all"].remedy


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(x) * (2.0 if torch.compiler.is_compiling() else 1.0)


def compiled(inner):
    torch._dynamo.reset()
    model = Net(inner)
    whole = torch.compile(model, backend="eager")
    found = trained(model, n=3, loss=lambda model, ids, labels: loss_of(whole, ids, labels))
    return found["compiled_equals_eager"]


def test_compiled_code_that_differs():
    assert compiled(nn.Linear(6, 6)).status is PASSED
    assert compiled(Branching()).status is FAILED


class Routed(nn.Module):
    """Two experts, whose router keeps its balance loss."""

    def __init__(self, is_detached=False):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList(Expert(6, 6) for _ in range(2))
        self.is_detached = is_detached

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        mean = p.detach() if self.is_detached else p
        self.aux_loss = 2 * (mean.mean((0, 1)) * (p.detach() > 0.5).double().mean((0, 1))).sum()
        return x + sum(p[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def routed(is_added=True, **options):
    def loss(model, ids, labels):
        return loss_of(model, ids, labels) + (0.01 * model.middle.aux_loss if is_added else 0)

    return trained(Net(Routed(**options)), n=4, loss=loss)["balance_loss"]


def test_balance_losses_that_modules_keep():
    assert routed().status is PASSED
    found = routed(is_added=False)
    assert found.status is FAILED
    assert "middle" in found.where
    found = routed(is_detached=True)
    assert found.status is FAILED
    assert "no gradient reaches the router" in found.evidence
    assert routed(is_added=False, is_detached=True).status is Status.NOT_APPLICABLE


def mixture(loss=own_loss, **options):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, num_local_experts=2, use_cache=False, **options,
    )  # fmt: skip
    return trained(MixtralForCausalLM(config), n=3, loss=loss)["balance_loss"]


def test_the_balance_loss_of_a_mixture_of_experts():
    assert mixture(output_router_logits=True, router_aux_loss_coef=0.02).status is PASSED
    # The script computes its loss from the logits.
    found = mixture(loss=loss_of_logits, output_router_logits=True, router_aux_loss_coef=0.02)
    assert found.status is FAILED
    assert "no part of the loss" in found.evidence
    found = mixture(router_aux_loss_coef=0.02)
    assert found.status is FAILED
    assert found.where == "output_router_logits"


def test_gradients_that_are_all_0():
    net = Net()
    nn.init.zeros_(net.head.weight).requires_grad_(False)
    net.head.bias.requires_grad_(False)
    found = trained(net)["gradients_reach_all"]
    assert found.status is FAILED
    assert "exactly 0" in found.evidence


def test_a_factor_without_gradient_beside_another_of_the_same_shapes():
    class LowRank(nn.Module):
        def __init__(self, is_cut):
            super().__init__()
            self.a, self.b, self.is_cut = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8)), is_cut

        def forward(self, x):
            return x + x @ (self.a.detach() if self.is_cut else self.a) @ self.b

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = LowRank(True), LowRank(True), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.second(self.first(x)))

    batches = [(torch.randn(6, 8), torch.arange(6) % 3) for _ in range(4)]
    found = checked(Two(), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batches)["gradients_reach_all"]
    assert found.status is Status.FAILED, found
    assert "first.a" in found.where
