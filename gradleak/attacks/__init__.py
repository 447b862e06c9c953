"""Attacks: from an observation to a reconstruction."""

from gradleak.attacks import labels
from gradleak.attacks.base import Attack, Reconstruction
from gradleak.attacks.matching import gradient_matching
from gradleak.attacks.presets import csdlg, csdlg_fast, csdlg_lbfgs, dga, dlg, gia, gs, idlg
from gradleak.attacks.registry import REGISTRY, AttackTemplate, parse

__all__ = [
  'REGISTRY',
  'Attack',
  'AttackTemplate',
  'Reconstruction',
  'csdlg',
  'csdlg_fast',
  'csdlg_lbfgs',
  'dga',
  'dlg',
  'gia',
  'gradient_matching',
  'gs',
  'idlg',
  'labels',
  'parse',
]
