"""Token-serial gated delta rule: the launchers of KDA, which serve a gate per head or none, too."""

from .recurrent import backward, forward, forward_residuals

__all__ = ["backward", "forward", "forward_residuals"]
