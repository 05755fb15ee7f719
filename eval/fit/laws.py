"""The laws by name."""

from eval.fit.curves import ANNEALING, MULTI_POWER
from eval.fit.law import Law
from eval.fit.sizes import CHINCHILLA, DATA_CONSTRAINED, DOWNSTREAM, KAPLAN

LAWS: dict[str, Law] = {
    law.name: law
    for law in (CHINCHILLA, KAPLAN, DATA_CONSTRAINED, ANNEALING, MULTI_POWER, DOWNSTREAM)
}
