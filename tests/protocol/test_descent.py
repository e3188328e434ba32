import math
from copy import deepcopy

import numpy as np
import pytest
import torch

from vafl.errors import ConfigError
from vafl.protocol.descent import Descent
from vafl.protocol.settings import OptimiserSettings


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values))


def array(*values):
    return np.array(values, np.float32)


def stepped(settings, gradients, server=False, l2=0.0):
    """Return a parameter that starts at (1, 2), after steps along these gradients at iterations 0, 1, ..."""
    moved = parameter(1.0, 2.0)
    descent = Descent.of(settings, [moved], server=server)
    for iteration, gradient in enumerate(gradients):
        descent.step([array(*gradient)], iteration, l2=l2)
    return moved.tolist()


def test_plain_sgd():
    assert stepped(OptimiserSettings(step_size=0.5), [[1.0, -2.0], [2.0, 0.0]]) == [-0.5, 3.0]


def test_l2_pulls_each_parameter_to_zero_from_where_it_is():
    assert stepped(OptimiserSettings(step_size=0.5), [[1.0, -2.0], [2.0, 0.0]], l2=0.5) == [-0.8125, 1.875]


@pytest.mark.parametrize("settings", [{}, {"options": {"momentum": 0.9}}, {"name": "Adam"}], ids=str)
def test_l2_is_a_gradient_like_any_other_and_changes_none_that_parameters_share(settings):
    settings, shared = OptimiserSettings(step_size=0.1, **settings), array(3.0, 4.0)
    starts = [(1.0, -2.0), (0.5, 8.0)]
    ours, theirs = ([parameter(*start) for start in starts] for _ in range(2))
    Descent.of(settings, ours).step([shared, shared], 0, l2=0.5)
    Descent.of(settings, theirs).step([array(3.5, 3.0), array(3.25, 8.0)], 0)
    assert [own.tolist() for own in ours] == [other.tolist() for other in theirs]
    assert shared.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        (OptimiserSettings(step_size=0.1, options={"momentum": 0.9}), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
        (OptimiserSettings(name="Adam", step_size=0.1), lambda p: torch.optim.Adam(p, 0.1)),
        (
            OptimiserSettings(name="Adam", step_size=0.1, options={"amsgrad": True}),
            lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
        ),
        (
            OptimiserSettings(name="RMSprop", step_size=0.1, options={"alpha": 0.5}),
            lambda p: torch.optim.RMSprop(p, 0.1, 0.5),
        ),
    ],
    ids=["momentum", "adam", "amsgrad", "rmsprop"],
)
def test_any_optimiser_of_torch(settings, make):
    gradients = [[1.0, -2.0], [0.5, 3.0], [-1.0, 1.0]]
    expected = parameter(1.0, 2.0)
    optimiser = make([expected])
    for gradient in gradients:
        expected.grad = torch.tensor(gradient)
        optimiser.step()
    assert stepped(settings, gradients) == expected.tolist()


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("options", [{}, {"betas": [0.5, 0.9], "eps": 1e-3, "weight_decay": 0.1}], ids=len)
def test_adam_steps_as_torchs_own_does_and_goes_on_from_its_state(name, options):
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(3, 2, generator=generator), torch.randn(5, generator=generator)]
    gradients = [
        [torch.randn(start.shape, generator=generator).numpy() for start in starts] for _ in range(6)
    ]
    theirs, ours, again = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(3))
    expected = getattr(torch.optim, name)(theirs, 0.1, **options)
    settings = OptimiserSettings(name=name, step_size=0.1, options=options)
    descent, resumed = Descent.of(settings, ours), Descent.of(settings, again)
    for iteration, each in enumerate(gradients):
        if iteration == 3:
            for parameter, stepped in zip(again, theirs, strict=True):
                parameter.data.copy_(stepped)
            resumed.restore(deepcopy(expected.state_dict()))
        for parameter, gradient in zip(theirs, each, strict=True):
            parameter.grad = torch.from_numpy(gradient)
        expected.step()
        descent.step(each, iteration)
        if iteration >= 3:
            resumed.step(each, iteration)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(again, theirs)


def test_the_servers_own_step_size():
    settings = OptimiserSettings(step_size=0.5, server_step_size=0.25)
    assert stepped(settings, [[1.0, 0.0]], server=True) == [0.75, 2.0]
    assert stepped(settings, [[1.0, 0.0]]) == [0.5, 2.0]
    assert stepped(OptimiserSettings(step_size=0.5), [[1.0, 0.0]], server=True) == [0.5, 2.0]


@pytest.mark.parametrize("options", [{}, {"dampening": 0.0}], ids=["plain", "torch"])
def test_a_schedule_follows_the_global_iteration(options):
    settings = OptimiserSettings(
        schedule="harmonic", constants={"numerator": 1.0, "offset": 1.0}, options=options
    )
    found = stepped(settings, [[1.0, 0.0]] * 3)
    assert found == pytest.approx([1 - (1 + 1 / 2 + 1 / 3), 2.0])


def test_the_heads_step_size_scales_the_schedule():
    """The theorems for t clients per step have eta_0 = t eta_m."""
    settings = OptimiserSettings(
        step_size=0.1,
        server_step_size=0.3,
        schedule="harmonic",
        constants={"numerator": 1.0, "offset": 10.0},
    )
    assert [settings.step_sizes()(k) for k in (0, 10)] == pytest.approx([0.1, 0.05])
    assert [settings.step_sizes(server=True)(k) for k in (0, 10)] == pytest.approx([0.3, 0.15])


def test_state_is_what_the_optimiser_remembers():
    plain = Descent.of(OptimiserSettings(), [parameter(1.0)])
    assert plain.state() == {}
    adam = Descent.of(OptimiserSettings(name="Adam"), [parameter(1.0)])
    adam.step([array(1.0)], 0)
    assert adam.state()["state"][0]["step"] == 1


@pytest.mark.parametrize("strided", ["parameter", "gradient"])
@pytest.mark.parametrize("settings", [{"options": {"momentum": 0.9}}, {"name": "Adam"}], ids=["sgd", "adam"])
def test_strides_change_no_step_and_what_is_remembered_is_restored(settings, strided):
    settings = OptimiserSettings(step_size=0.1, **settings)
    start, slope = torch.arange(6.0).reshape(2, 3), np.arange(6, 12, dtype=np.float32).reshape(2, 3)
    plain, other = (torch.nn.Parameter(start.clone()) for _ in range(2))
    if strided == "parameter":
        other = torch.nn.Parameter(start.t().contiguous().t())
    own = np.asfortranarray(slope) if strided == "gradient" else slope
    ours, theirs = Descent.of(settings, [plain]), Descent.of(settings, [other])
    for iteration in range(2):
        ours.step([slope], iteration)
        theirs.step([own], iteration)
    again = Descent.of(settings, [other])
    again.restore(theirs.state())
    ours.step([slope], 2)
    again.step([own], 2)
    torch.testing.assert_close(other.detach(), plain.detach())


def test_momentum_goes_on_from_where_it_was():
    settings = OptimiserSettings(step_size=0.1, options={"momentum": 0.9})
    (whole, broken), gradient = [[parameter(1.0)] for _ in range(2)], [array(1.0)]
    straight, first = Descent.of(settings, whole), Descent.of(settings, broken)
    for descent in (straight, straight, first):
        descent.step(gradient, 0)
    second = Descent.of(settings, broken)
    second.restore(first.state())
    second.step(gradient, 0)
    assert whole == broken


def test_nothing_to_move_is_fine():
    nothing = Descent.of(OptimiserSettings(name="Adam"), [])
    nothing.step([], 0)
    nothing.restore(nothing.state())


def test_one_gradient_a_parameter():
    with pytest.raises(ValueError, match="1 gradients are needed"):
        Descent.of(OptimiserSettings(), [parameter(1.0)]).step([], 0)


HARMONIC = {"numerator": 1.0, "offset": 1.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"step_size": 0.0}, r"VFL-4197.*0\.0"),
        ({"step_size": math.nan}, r"VFL-4197.*nan"),
        ({"step_size": math.inf}, r"VFL-4197.*inf"),
        ({"server_step_size": -0.1}, r"VFL-4198.*\-0\.1"),
        ({"server_step_size": math.nan}, r"VFL-4198.*nan"),
        ({"l2": -1.0}, r"VFL-4199.*\-1\.0"),
        ({"l2": math.nan}, r"VFL-4199.*nan"),
        (
            {"name": "Adamm"},
            r"VFL-4052.*Adamm.*Adam",
        ),
        ({"name": "lr_scheduler"}, r"VFL-4052.*lr_scheduler"),
        ({"name": "Optimizer"}, r"VFL-4051.*Optimizer"),
        ({"name": "LBFGS"}, r"VFL-4051.*LBFGS"),
        ({"options": {"momentumm": 0.9}}, r"VFL-4051.*\{'momentumm': 0\.9\}"),
        ({"name": "Adam", "options": {"betas": [0.9]}}, r"VFL-4051.*\{'betas': \[0\.9\]\}"),
        ({"name": "Adam", "options": {"eps": -1.0}}, "VFL-4051"),
        ({"name": "AdamW", "options": {"betas": [0.9, 1.0]}}, "VFL-4051"),
        ({"name": "Adam", "options": {"eps": "1"}}, r"VFL-4051.*\{'eps': '1'\}"),
        ({"options": {"momentum": -1.0}}, r"VFL-4200.*\-1\.0"),
        ({"options": {"momentum": "1"}}, r"VFL-4200.*'1'"),
        ({"schedule": "harmonious"}, r"VFL-4201.*harmonious"),
        ({"schedule": "harmonic"}, r"VFL-4202.*numerator, offset"),
        (
            {"schedule": "harmonic", "constants": {**HARMONIC, "x": 1}},
            r"VFL-4202.*got an unexpected keyword argument 'x'",
        ),
        (
            {"schedule": "harmonic", "constants": {**HARMONIC, "offset": "1"}},
            r"VFL-4213.*offset",
        ),
        (
            {"schedule": "nonconvex-stochastic", "constants": {"L": 1, "K": 9, "rho": "1/2", "pbar": [1]}},
            r"VFL-4202.*L, K, rho, pbar, c_eta",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        OptimiserSettings(**settings)


def averaged(settings, weights):
    """Return a model that averages the trained parameters, and its descent."""
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.copy_(torch.tensor([weights]))
    return model, Descent.averaging(settings, model)


def test_a_model_becomes_the_average_of_the_recent_steps():
    model, descent = averaged(OptimiserSettings(step_size=0.5), [1.0, 2.0])
    trained, mean = np.array([[1.0, 2.0]]), np.zeros((1, 2))
    for step in range(40):
        gradient = np.array([[step % 3, 1.0]], np.float32)
        descent.step([gradient], step)
        trained = trained - 0.5 * gradient
        mean += (trained - mean) * 10 / (10 + step)
    assert torch.allclose(descent.trains(model).weight, torch.tensor(trained, dtype=torch.float32))
    assert torch.allclose(model.weight, torch.tensor(mean, dtype=torch.float32), atol=1e-5)


def test_an_average_goes_on_from_its_state_as_if_nothing_had_happened():
    settings = OptimiserSettings(name="AdamW", step_size=0.1)
    model, descent = averaged(settings, [1.0, 2.0])
    again, resumed = averaged(settings, [7.0, 7.0])
    gradients = np.random.default_rng(0).normal(size=(9, 1, 2)).astype(np.float32)
    for step in range(5):
        descent.step([gradients[step]], step)
    again.load_state_dict(model.state_dict())
    resumed.restore(deepcopy(descent.state()))
    for step in range(5, 9):
        descent.step([gradients[step]], step)
        resumed.step([gradients[step]], step)
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(resumed.parameters[0], descent.parameters[0])


def test_an_averaged_model_knows_what_its_layers_counted_in_training():
    model = torch.nn.BatchNorm1d(2)
    trained = Descent.averaging(OptimiserSettings(), model).trains(model)
    trained(torch.tensor([[4.0, 0.0], [6.0, 0.0]]))
    assert model.running_mean[0] == pytest.approx(0.5)  # a tenth of the way to 5
