"""KSS in custom training loops: how a loop computes its gradient must not change the gradient of the penalty."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.about import about
from tests.callbacks.test_kss_shaper import Stack, assert_close, hooks_of, kss_with, loss_of, sgd, step
from tests.small_training import same_weights
from workbench.errors import SnapshotError

RATE, STRENGTH = 0.01, 2.0
TINY = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}


def gpt2(**options):
    """A small GPT-2 with dropout; all calls return the same model."""
    import transformers

    config = transformers.GPT2Config(**TINY, bos_token_id=0, eos_token_id=0, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).train()


def llama(**options):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, **options,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).train()


def added(make, loop, *, make_optimizer=sgd, strength=STRENGTH, **options):
    """Return what KSS adds to the gradient of one update, from runs with and without it.

    Both runs have the same initial parameters and dropout. ``loop(model, optimizer)`` performs one update.
    """
    parameters = []
    for is_on in (False, True):
        model = make()
        bare = getattr(model, "_orig_mod", model)
        optimizer = make_optimizer(bare)
        torch.manual_seed(1)
        with kss_with(strength=strength, enabled=is_on, **options).attach(model, optimizer) as shaper:
            loop(model, optimizer)
        parameters.append([parameter.detach().clone() for parameter in bare.parameters()])
    assert shaper.last.n_acting == 2
    return [(without - with_kss) / (RATE * strength) for without, with_kss in zip(*parameters, strict=True)]


def standard_loop(task):
    return lambda model, optimizer: step(model, optimizer, task.batch(0))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_hugging_face_models_in_a_standard_loop(task, make):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = hooks_of(model, optimizer)
    penalties = []
    with kss_with(strength=1.0).attach(model, optimizer) as shaper:
        for _ in range(12):
            tokens, _ = task.batch(0)
            model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            penalties.append(shaper.last.penalty)
            assert shaper.last.n_acting == 2
    assert penalties[-1] < 0.7 * penalties[0]
    assert hooks_of(model, optimizer) == before


def test_padding_yields_no_snapshots(task):
    """The penalty of a padded batch is that of its tokens."""
    model, penalties = gpt2(), []
    tokens = task.batch(0)[0][:, :8]
    padded = torch.cat([tokens, torch.full_like(tokens, 31)], 1)
    mask = torch.cat([torch.ones_like(tokens), torch.zeros_like(tokens)], 1)
    for inputs in ({"input_ids": tokens}, {"input_ids": padded, "attention_mask": mask}):
        optimizer = sgd(model, 0.0)
        with kss_with().attach(model, optimizer) as shaper:
            model(**inputs).logits.sum().backward()
            optimizer.step()
        penalties.append(shaper.last.penalty)
    assert penalties[1] == pytest.approx(penalties[0], rel=1e-4)


def test_gradient_accumulation_adds_the_penalty_once(task):
    tokens, targets = task.batch(0)

    def accumulated(model, optimizer):
        for part in (slice(0, 4), slice(4, 8)):
            (loss_of(model, (tokens[part], targets[part])) / 2).backward()
        optimizer.step()

    last = (tokens[4:], targets[4:])
    expected = added(gpt2, lambda model, optimizer: step(model, optimizer, last))
    assert_close(added(gpt2, accumulated), expected, tolerance=1e-3)


def autocast_loop(task, dtype, scaler=None, *, clips=False):
    """One update under automatic mixed precision, as in the documentation of PyTorch."""

    def loop(model, optimizer):
        with torch.autocast("cpu", dtype):
            loss = loss_of(model, task.batch(0))
        if scaler is None:
            loss.backward()
            optimizer.step()
            return
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()

    return loop


def test_bfloat16_autocast_leaves_the_penalty_in_full_precision(task):
    expected = added(gpt2, standard_loop(task))
    assert_close(added(gpt2, autocast_loop(task, torch.bfloat16)), expected, tolerance=1e-3)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_gradient_scaler_does_not_scale_the_penalty(task, is_fused, clips):
    """Fused optimizers unscale the gradients themselves; others receive unscaled gradients."""

    def optimizer_of(model):
        return torch.optim.SGD(model.parameters(), lr=RATE, fused=is_fused)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loop = autocast_loop(task, torch.float16, scaler, clips=clips)
    assert_close(added(gpt2, loop, make_optimizer=optimizer_of), added(gpt2, standard_loop(task)), tolerance=1e-3)


def test_an_update_that_overflows_is_not_counted_as_a_step(task):
    model = gpt2()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    weights = [weight.detach().clone() for weight in model.parameters()]
    with kss_with().attach(model, optimizer) as shaper:
        for factor, n_steps in ((float("inf"), 0), (1.0, 1)):
            scaler.scale(loss_of(model, task.batch(0)) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert shaper.step == n_steps
            assert torch.equal(weights[0], next(iter(model.parameters()))) == (n_steps == 0)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_gradient_checkpointing_of_hugging_face(task, make, is_reentrant):
    def checkpointed():
        model = make()
        model.activation_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()  # required by reentrant checkpointing
        return model

    assert_close(added(checkpointed, standard_loop(task)), added(make, standard_loop(task)), tolerance=1e-3)


class Checkpointed(nn.Module):
    """A block with dropout that recomputes its branch in training and in eval mode."""

    def __init__(self, is_reentrant, is_on=True):
        super().__init__()
        self.inside = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))
        self.is_reentrant, self.is_on = is_reentrant, is_on

    def forward(self, x):
        if not self.is_on:
            return x + self.inside(x)
        return x + checkpoint(self.inside, x, use_reentrant=self.is_reentrant)


def checkpointed_stack(is_reentrant=False, is_on=True):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Stack([Checkpointed(is_reentrant, is_on) for _ in range(2)])


def test_blocks_that_always_recompute_do_so_in_eval_mode(task):
    """With the dropout of training the gradient would be different."""
    expected = added(lambda: checkpointed_stack(is_on=False), standard_loop(task))
    assert_close(added(checkpointed_stack, standard_loop(task)), expected, tolerance=1e-3)


class Recomputing(Stack):
    """A model that recomputes entire blocks."""

    def __init__(self, blocks, is_reentrant):
        super().__init__(blocks)
        self.is_reentrant = is_reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: checkpointed_stack(is_reentrant=True),
        lambda: Recomputing(checkpointed_stack(is_on=False).blocks, is_reentrant=True),
        lambda: Recomputing(checkpointed_stack(is_on=False).blocks, is_reentrant=False),
    ],
    ids=["within blocks, reentrant", "entire blocks, reentrant", "entire blocks"],
)
def test_states_that_recomputation_hides_raise(task, make):
    model = make()
    optimizer = sgd(model)
    error = about("model", type(model).__name__)
    with kss_with().attach(model, optimizer), pytest.raises(SnapshotError, check=error):
        step(model, optimizer, task.batch(0))
    assert all(module.training for module in model.modules())


@pytest.fixture
def without_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.usefixtures("without_compiled_code")
@pytest.mark.parametrize("way", ["entire model", "in place", "blocks", "used before"])
def test_compiled_models(make_model, task, way):
    """The pass of KSS runs the uncompiled model: its hooks are called, and not compiled."""
    n_graphs = []

    def backend(graph, inputs):
        n_graphs[-1] += 1
        return graph.forward

    def make():
        torch._dynamo.reset()
        n_graphs.append(0)
        model = make_model("none", init_std=0.15)
        if way in ("blocks", "in place"):
            for module in model.blocks if way == "blocks" else [model]:
                module.compile(backend=backend)
            return model
        compiled = torch.compile(model, backend=backend)
        if way == "used before":
            loss_of(compiled, task.batch(1)).backward()
            model.zero_grad()
        return compiled

    def loop(model, optimizer):
        for i in range(3):
            step(model, optimizer, task.batch(i))

    expected = added(lambda: make_model("none", init_std=0.15), loop)
    assert_close(added(make, loop), expected, tolerance=1e-3)
    without, with_kss = n_graphs
    assert with_kss == without > 0


def test_evaluation_between_the_backward_pass_and_the_update(task):
    """The penalty is measured on the last training batch, not on a batch that was evaluated after it."""
    model, other = (gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0) for _ in range(2))
    for subject, evaluates in ((model, True), (other, False)):
        optimizer = sgd(subject)
        with kss_with().attach(subject, optimizer):
            loss_of(subject, task.batch(0)).backward()
            if evaluates:
                subject.eval()
                with torch.no_grad():
                    cross_entropy(subject(task.batch(5)[0]).logits.flatten(0, 1), task.batch(5)[1].flatten())
                subject.train()
                with torch.no_grad():
                    subject(task.batch(6)[0])
            optimizer.step()
    assert same_weights(model, other)
