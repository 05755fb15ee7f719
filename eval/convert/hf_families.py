"""The earlier place of `eval.convert.families`, which scripts of users import."""

from eval.convert.families import FAMILIES, family_of, find_family
from eval.convert.families.family import Family, TensorPlace, TensorRow

__all__ = ['FAMILIES', 'Family', 'TensorPlace', 'TensorRow', 'family_of', 'find_family']
