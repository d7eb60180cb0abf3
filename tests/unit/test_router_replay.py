"""Router replay in a real Megatron-Core trainer on the CPU: what the routers used, what they learn, and when nothing changes."""

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from references.replay_reference import gate_weights, router_gradient
from references.replay_reference import sum_in_slot_order as slow_sum_in_slot_order
from training_cases import fresh_generator, nll, random_batch, small_config, trained_tokens

from e2e_fp8.config.root import Config
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.packing import pad_packed
from e2e_fp8.training.router_replay import sum_in_slot_order
from e2e_fp8.training.shared_modules import SharedMoELayer

MODES = pytest.mark.parametrize("mode", ["R3", "R3_weights_order"])
LENGTHS = [7, 12, 4]
LAYERS, EXPERTS = 2, 8


@pytest.fixture
def generator():
    return fresh_generator()


def config(mode: str, *, k: int = 4, precision: str = "bf16", **model) -> Config:
    values = small_config("qwen3_moe", precision, num_experts=EXPERTS, num_experts_per_tok=k, **model).model_dump()
    # a clipped gradient would be scaled in place
    values["training"] |= {"router_replay": {"mode": mode}, "clip_grad": 1e9}
    return Config.model_validate(values)


def random_ids(tokens: int, k: int, generator: torch.Generator) -> torch.Tensor:
    scores = torch.rand(tokens, LAYERS, EXPERTS, generator=generator)
    return scores.argsort(dim=2)[:, :, :k].int()


def random_weights(ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    weights = torch.rand(ids.shape, generator=generator) + 0.1
    return weights / weights.sum(dim=2, keepdim=True)


def replayed(batch, mode: str, generator: torch.Generator, *, k: int = 4, mask: torch.Tensor | None = None):
    ids = random_ids(batch.token_ids.numel(), k, generator)
    return replace(
        batch,
        routed_experts=ids,
        routed_weights=random_weights(ids, generator) if mode == "R3_weights_order" else None,
        replay_mask=torch.ones(ids.shape[:2], dtype=torch.bool) if mask is None else mask,
    )


class Watch:
    """Inputs and outputs of every router, the gradients of its gate weights, and the expert outputs around each combination."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.routers = [layer.mlp.router for layer in engine.model.decoder.layers]
        self.dispatchers = [layer.mlp.token_dispatcher for layer in engine.model.decoder.layers]
        self.x, self.probs, self.maps, self.grads, self.summed = {}, {}, {}, {}, {}
        for index, (router, dispatcher) in enumerate(zip(self.routers, self.dispatchers, strict=True)):
            router.register_forward_hook(lambda module, given, found, index=index: self._see(index, given[0], *found))
            dispatcher.combine_postprocess = lambda rows, index=index, inner=dispatcher.combine_postprocess: self._sum(index, rows, inner)

    def _see(self, index, x, probs, routing_map):
        self.x[index] = x.detach().reshape(-1, x.shape[-1])
        self.probs[index], self.maps[index] = probs.detach().clone(), routing_map.clone()
        if probs.requires_grad:
            probs.register_hook(lambda grad: self.grads.__setitem__(index, grad.clone()))

    def _sum(self, index, rows, inner):
        found = inner(rows)
        self.summed[index] = rows.detach().clone(), found.detach().reshape(rows.shape[0] // self.maps[index].sum(1)[0], -1).clone()
        return found


def sets(ids: torch.Tensor) -> torch.Tensor:
    """bool ``[T, E]`` of ids ``[T, k]``."""
    return torch.zeros(len(ids), EXPERTS, dtype=torch.bool).scatter(1, ids.long(), True)


@MODES
def test_the_routers_use_the_replayed_experts_and_weights(mode, generator):
    engine = MegatronEngine(config(mode))
    watch = Watch(engine)
    batch = replayed(random_batch(LENGTHS, generator), mode, generator)
    for run in (lambda: engine.token_stats([batch]), lambda: engine.train_step([batch], nll, trained_tokens([batch]))):
        weights = [router.weight.detach().clone() for router in watch.routers]
        run()
        for layer, weight in enumerate(weights):
            ids = batch.routed_experts[:, layer].long()
            assert torch.equal(watch.maps[layer], sets(ids))
            assert torch.equal(watch.probs[layer] != 0, sets(ids))
            chosen = watch.probs[layer].gather(1, ids)
            if mode == "R3_weights_order":
                assert torch.equal(chosen, batch.routed_weights[:, layer])
            else:
                assert_gate_weights(chosen, watch.x[layer], weight, ids, over_chosen=True)


def assert_gate_weights(found, x, weight, ids, *, over_chosen):
    """Against float64; a logit of H products summed in FP32 is off by at most H eps sum|x w|, a gate weight by twice that and a few eps."""
    logits = (x.double() @ weight.double().T).tolist()
    expected = [gate_weights(row, own, over_chosen=over_chosen) for row, own in zip(logits, ids.tolist(), strict=True)]
    eps = torch.finfo(torch.float32).eps
    error = 2 * x.shape[1] * eps * float((x.double().abs() @ weight.double().abs().T).max()) + 32 * eps
    assert (found.double() - torch.tensor(expected, dtype=torch.float64)).abs().max() <= error


@MODES
def test_the_router_learns_what_the_slow_reference_says(mode, generator):
    engine = MegatronEngine(config(mode))
    watch = Watch(engine)
    batch = replayed(random_batch(LENGTHS, generator), mode, generator)
    weights = [router.weight.detach().clone() for router in watch.routers]
    assert not engine.train_step([batch], nll, trained_tokens([batch])).skipped
    for layer, router in enumerate(watch.routers):
        found = router.weight.main_grad.double()
        expected, terms, logit = router_gradient(watch.x[layer], weights[layer], batch.routed_experts[:, layer], watch.grads[layer])
        assert expected.abs().max() > 0
        eps, tokens = torch.finfo(torch.float32).eps, len(batch.token_ids)
        # worst case: a logit of H products in FP32 changes a gate weight by twice its error; sums over tokens in FP32; one rounding to BF16
        relative = 4 * watch.x[layer].shape[1] * eps * logit + (tokens + 32) * eps
        assert bool(((found - expected).abs() <= 2**-8 * expected.abs() + 1.01 * relative * terms).all())
        assert (found - expected).norm() < 0.01 * expected.norm()


@MODES
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_replaying_its_own_choices_changes_no_bit_of_log_probs(mode, precision, generator):
    for k in (2, 4):
        engine = MegatronEngine(config(mode, k=k, precision=precision))
        batch = random_batch(LENGTHS, generator)
        plain, own = recorded(engine, mode, batch, lambda e=engine, b=batch: e.token_stats([b])[0])
        again = engine.token_stats([own])[0]
        assert torch.equal(again.log_probs, plain.log_probs)
        assert torch.equal(again.entropy, plain.entropy)
        counts = engine.take_replay_counts()
        assert set(counts.changed.values()) == {0.0}
        assert set(counts.assigned.values()) == {float(k * len(batch.token_ids))}


def recorded(engine, mode, batch, run):
    """Result of ``run``, and ``batch`` with the choices that the routers made in it."""
    watch, hooks = Watch(engine), [layer.hook for layer in engine.router_replays.layers]
    for hook in hooks:
        hook.set_router_replay_action(RouterReplayAction.RECORD)
    result = run()
    ids = torch.stack([hook.get_recorded_indices() for hook in hooks], dim=1)
    for hook in hooks:
        hook.stop()
    if mode == "R3_weights_order":
        # Megatron adds in the order of expert ids
        ids = ids.sort(dim=2).values
    weights = torch.stack([watch.probs[layer].gather(1, ids[:, layer]) for layer in range(LAYERS)], dim=1)
    mask = torch.ones(ids.shape[:2], dtype=torch.bool)
    own = replace(batch, routed_experts=ids.int(), routed_weights=weights if mode == "R3_weights_order" else None, replay_mask=mask)
    return result, own


@pytest.mark.parametrize(("mode", "k"), [("R3", 2), ("R3", 4), ("R3_weights_order", 2)])
def test_replaying_its_own_choices_changes_no_bit_of_an_update(mode, k, generator):
    plain, again = (MegatronEngine(config(mode, k=k, precision="fp8")) for _ in range(2))
    batch = random_batch(LENGTHS, generator)
    denominator = trained_tokens([batch])
    first, own = recorded(plain, mode, batch, lambda: plain.train_step([batch], nll, denominator))
    second = again.train_step([own], nll, denominator)
    assert second == first
    for (name, left), (_, right) in zip(plain.named_masters(), again.named_masters(), strict=True):
        assert torch.equal(left, right), name


def test_expert_outputs_are_added_in_the_order_of_the_slots(generator):
    engine = MegatronEngine(config("R3_weights_order"))
    watch = Watch(engine)
    batch = replayed(random_batch(LENGTHS, generator), "R3_weights_order", generator)
    engine.token_stats([batch])
    first = dict(watch.summed)
    order = torch.randperm(4, generator=generator)
    permuted = replace(batch, routed_experts=batch.routed_experts[:, :, order], routed_weights=batch.routed_weights[:, :, order])
    engine.token_stats([permuted])
    for case, summed in ((batch, first), (permuted, watch.summed)):
        for layer, (rows, found) in summed.items():
            assert torch.equal(found, slow_sum_in_slot_order(rows, case.routed_experts[:, layer], EXPERTS))


def test_the_order_of_addition_shows_where_it_can(generator):
    """Of 2^30, -2^30 and 1 in FP32, 1 survives only if it comes last."""
    ids = torch.tensor([[5, 2, 7], [5, 7, 2]])
    rows = torch.tensor([-(2.0**30), -(2.0**30), 2.0**30, 2.0**30, 1.0, 1.0])[:, None].expand(6, 16)
    found = sum_in_slot_order(rows, sets(ids), ids)
    assert found[:, 0].tolist() == [1.0, 0.0]
    assert torch.equal(found, slow_sum_in_slot_order(rows, ids, EXPERTS))


@MODES
def test_a_layer_of_shared_operators_uses_them_too(mode, generator):
    """numerics.alignment=bitwise: replayed gate weights in the engine's order, and no gradient but that of the router's own."""
    values = config(mode, precision="fp8").model_dump()
    values["numerics"] |= {"alignment": "bitwise"}
    engine = MegatronEngine(Config.model_validate(values))
    layers = [layer.mlp for layer in engine.model.decoder.layers]
    seen: dict[int, tuple] = {}
    for index, layer in enumerate(layers):
        assert isinstance(layer, SharedMoELayer)
        layer.choose = lambda logits, index=index, inner=layer.choose: seen.setdefault(index, (logits.detach(), *inner(logits)))[1:]
    plain = random_batch(LENGTHS, generator)
    mask = torch.rand(plain.token_ids.numel(), LAYERS, generator=generator) > 0.3
    batch = replayed(plain, mode, generator, mask=mask)
    engine.token_stats([plain])
    own_choices, _ = dict(seen), seen.clear()
    engine.token_stats([batch])
    for index in range(LAYERS):
        _, weights, ids = seen[index]
        kept = mask[:, index]
        assert torch.equal(ids[kept], batch.routed_experts[:, index].long()[kept])
        if mode == "R3_weights_order":
            assert torch.equal(weights[kept], batch.routed_weights[:, index][kept])
    first_own, first = own_choices[0], seen[0]
    assert torch.equal(first[1][~mask[:, 0]], first_own[1][~mask[:, 0]])


@MODES
def test_what_is_not_covered_is_routed_by_the_router(mode, generator):
    engine = MegatronEngine(config(mode))
    watch = Watch(engine)
    plain = random_batch(LENGTHS, generator)
    mask = torch.rand(len(plain.token_ids), LAYERS, generator=generator) < 0.5
    batch = replayed(plain, mode, generator, mask=mask)
    engine.token_stats([batch])
    counts = engine.take_replay_counts()
    for layer, router in enumerate(watch.routers):
        with engine.ground.scope(), torch.no_grad():
            own = sets(router.gating(watch.x[layer]).topk(4, dim=1).indices)
        given = sets(batch.routed_experts[:, layer])
        assert torch.equal(watch.maps[layer], torch.where(mask[:, layer, None], given, own))
        assert counts.assigned[layer] == 4.0 * int(mask[:, layer].sum())
        assert counts.changed[layer] == float((given & ~own & mask[:, layer, None]).sum())
    assert set(engine.take_replay_counts().assigned.values()) == {0.0}
    none = engine.token_stats([replayed(plain, mode, generator, mask=torch.zeros_like(mask))])[0]
    assert torch.equal(none.log_probs, engine.token_stats([plain])[0].log_probs)


def test_gate_weights_of_a_softmax_over_all_experts_are_replayed_too(generator):
    engine = MegatronEngine(config("R3", norm_topk_prob=False))
    watch = Watch(engine)
    batch = replayed(random_batch(LENGTHS, generator), "R3", generator)
    engine.token_stats([batch])
    for layer, router in enumerate(watch.routers):
        ids = batch.routed_experts[:, layer].long()
        assert_gate_weights(watch.probs[layer].gather(1, ids), watch.x[layer], router.weight.detach(), ids, over_chosen=False)


def test_a_trainer_keeps_its_routers_to_itself(generator):
    """Megatron drives replay through a list of the process, in which a reference policy would be found as well."""
    before = list(RouterReplay.global_router_replay_instances)
    engine, reference = MegatronEngine(config("R3")), MegatronEngine(config("R3"))
    assert RouterReplay.global_router_replay_instances == before
    batch = random_batch(LENGTHS, generator)
    expected = reference.token_stats([batch])[0].log_probs
    engine.token_stats([replayed(batch, "R3", generator)])
    assert torch.equal(reference.token_stats([batch])[0].log_probs, expected)
    assert torch.equal(engine.token_stats([batch])[0].log_probs, expected)


def test_a_failed_forward_leaves_no_routing_behind(generator):
    engine = MegatronEngine(config("R3"))
    batch = random_batch(LENGTHS, generator)
    expected = engine.token_stats([batch])[0].log_probs
    wrong = replace(replayed(batch, "R3", generator, k=3), replay_mask=torch.ones(len(batch.token_ids), LAYERS, dtype=torch.bool))
    with pytest.raises(ValueError, match="cannot be replayed"):
        engine.token_stats([wrong])
    with pytest.raises(ValueError, match="without a replay_mask"):
        engine.token_stats([replace(wrong, replay_mask=None)])
    assert torch.equal(engine.token_stats([batch])[0].log_probs, expected)


def test_without_replay_there_is_nothing_to_count(generator):
    engine = MegatronEngine(config("disabled"))
    engine.token_stats([random_batch(LENGTHS, generator)])
    assert engine.take_replay_counts() is None
    assert engine.model.decoder.layers[0].mlp.router.router_replay is None


def test_padding_is_not_covered(generator):
    batch = replayed(random_batch([5], generator), "R3_weights_order", generator)
    padded = pad_packed(batch, 8)
    assert padded.routed_experts.shape == padded.routed_weights.shape == (8, LAYERS, 4)
    assert torch.equal(padded.routed_experts[:5], batch.routed_experts)
    assert padded.replay_mask.tolist() == [[True] * LAYERS] * 5 + [[False] * LAYERS] * 3
    assert padded.without_replay().routed_experts is padded.without_replay().replay_mask is None
