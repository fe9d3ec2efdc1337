"""Linear layers through oneDNN: the numbers of torch's own, with gradients, and where they are used."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fleetbus_workers.learner.torch import onednn_linear  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(128, 32), (4, 100, 32), (2, 3, 50, 32)])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(shape[-1], 48, bias=bias)
    fast = copy.deepcopy(plain)
    onednn_linear.replace_linear(fast)
    assert type(fast) is onednn_linear.OneDnnLinear
    gradient = torch.randn(*shape[:-1], 48)
    found = []
    for layer in (plain, fast):
        given = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
        values = layer(given)
        values.backward(gradient)
        found.append([values.detach(), given.grad, *(parameter.grad for parameter in layer.parameters())])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    layer = nn.Linear(32, 48, bias=False)
    onednn_linear.replace_linear(layer)
    given = torch.randn(100, 32, requires_grad=frozen != "input")
    layer.weight.requires_grad_(frozen != "weight")
    layer(given).sum().backward()
    assert (given.grad is None, layer.weight.grad is None) == (frozen == "input", frozen == "weight")


def test_of_a_frozen_layer_no_input_is_kept() -> None:
    layer = nn.Linear(32, 48, bias=False).requires_grad_(False)
    onednn_linear.replace_linear(layer)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(tuple(each.shape)) or each, lambda each: each):  # type: ignore[func-returns-value]
        layer(torch.randn(100, 32, requires_grad=True))
    assert kept == [(48, 32)]


def test_a_second_derivative_is_refused_and_a_wrong_input_is_torchs_error() -> None:
    layer = nn.Linear(32, 48)
    onednn_linear.replace_linear(layer)
    given = torch.randn(100, 32, requires_grad=True)
    (first,) = torch.autograd.grad(layer(given).square().sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(torch.randn(100, 33))


def test_names_and_tied_weights_stay() -> None:
    model = nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 10, bias=False))
    model[1].weight = model[0].weight
    names = [name for name, _ in model.named_parameters()]
    onednn_linear.replace_linear(model)
    assert [name for name, _ in model.named_parameters()] == names and model[1].weight is model[0].weight


def test_other_types_autocast_and_small_inputs_go_torchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    half, whole = nn.Linear(32, 48, dtype=torch.bfloat16), nn.Linear(32, 48)
    for layer in (half, whole):
        onednn_linear.replace_linear(layer)
    assert type(half) is nn.Linear
    monkeypatch.setattr(onednn_linear, "_multiply", lambda *_: pytest.fail("oneDNN was called"))
    assert whole(torch.randn(onednn_linear.MIN_ROWS - 1, 32)).shape == (onednn_linear.MIN_ROWS - 1, 48)
    assert whole(torch.randn(0, 32)).shape == (0, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert whole(torch.randn(100, 32)).dtype == torch.bfloat16
