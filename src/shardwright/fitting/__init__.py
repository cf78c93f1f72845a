"""Does it fit: peak bytes of a device by kind for the usual ways to train a model, and what to change where it does not."""

from shardwright.fitting.account import Account, account, taken
from shardwright.fitting.answering import Change, Fit, Fitting, fits, fits_graph
from shardwright.fitting.ways import WAYS

__all__ = ["WAYS", "Account", "Change", "Fit", "Fitting", "account", "fits", "fits_graph", "taken"]
