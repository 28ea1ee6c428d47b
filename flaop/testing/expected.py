"""What the token loop and the budget reference of each family make of the same inputs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flaop.testing.budget import chunk_budget_reference
from flaop.testing.comparison import Expected
from flaop.testing.decay_budget import decay_budget_reference
from flaop.testing.decay_oracle import gla_oracle, simple_gla_oracle
from flaop.testing.gdn_budget import gdn_budget_reference
from flaop.testing.gdn_oracle import gdn_oracle
from flaop.testing.oracle import kda_oracle


class DeltaExpected(Expected):
    """Of kda or gated_delta_rule, whose inputs have no lower_bound."""

    def __init__(self, inputs: dict, oracle: Callable[..., tuple[Tensor, Tensor]] | None = None):
        kda = "lower_bound" in inputs
        oracle = oracle or (kda_oracle if kda else gdn_oracle)
        budget = chunk_budget_reference if kda else gdn_budget_reference
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
        super().__init__(inputs, oracle, budget, names)

    def terms(self, name: str, loss: str) -> Tensor | None:
        """The gate's parameters sum the gradient of the raw gate."""
        if name not in ("A_log", "dt_bias"):
            return None
        factor = 1.0
        if name == "A_log":
            x = self.inputs["g"].double()
            if self.inputs["dt_bias"] is not None:
                x = x + self.inputs["dt_bias"].double()
            bounded = self.inputs.get("lower_bound") is not None
            factor = x if bounded else F.softplus(x) / torch.sigmoid(x)
        return factor * self.gradient(0, "g", loss)


class DecayExpected(Expected):
    """Of simple_gla or gla, whose inputs have no g_gamma."""

    # The gradient of the initial state through the final state is a product of decays in fp32: of
    # sums over chunks in the budget reference, of one per token on the recurrent path.
    least = 1e-5

    def __init__(self, inputs: dict):
        oracle = simple_gla_oracle if "g_gamma" in inputs else gla_oracle
        names = ("q", "k", "v", "g", "g_gamma", "gv", "initial_state")
        super().__init__(inputs, oracle, decay_budget_reference, names)

    def leaves(self) -> dict[str, Tensor]:
        """Beside g_gamma always g, whose gradient it sums."""
        leaves = super().leaves()
        if "g_gamma" in leaves and "g" not in leaves:
            leaves["g"] = torch.zeros(self.inputs["v"].shape[:3], requires_grad=True)
        return leaves

    def terms(self, name: str, loss: str) -> Tensor | None:
        return self.gradient(0, "g", loss) if name == "g_gamma" else None
