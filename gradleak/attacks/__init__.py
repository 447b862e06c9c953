"""Attacks: from an observation to a reconstruction."""

from gradleak.attacks import labels
from gradleak.attacks.april import april
from gradleak.attacks.base import (
  EVIDENCE,
  Attack,
  AttackMethod,
  Reconstruction,
  as_attack,
  attack,
  closed_form,
  host_form,
  wrap,
)
from gradleak.attacks.bayes import bayes
from gradleak.attacks.decoded import fidel_decoder
from gradleak.attacks.fidel import fidel
from gradleak.attacks.generative import ggl, gias, gifd, pnp
from gradleak.attacks.learned import lti
from gradleak.attacks.linear import linear
from gradleak.attacks.matching import gradient_matching
from gradleak.attacks.peeling import peeling
from gradleak.attacks.presets import (
  annealed,
  cinet,
  csdlg,
  csdlg_fast,
  csdlg_lbfgs,
  dga,
  dlg,
  gia,
  gs,
  idlg,
  ladder,
  magia,
  prefix,
)
from gradleak.attacks.residual_peeling import residual_peeling
from gradleak.attacks.span import span
from gradleak.attacks.spear import spear_attack as spear
from gradleak.attacks.tableak import tableak
from gradleak.attacks.text import lamp, tag

# By name: what a text may name. Attacks of malicious servers are in `gradleak.servers`.
REGISTRY = {
  'dlg': dlg,
  'idlg': idlg,
  'csdlg': csdlg,
  'csdlg_fast': csdlg_fast,
  'csdlg_lbfgs': csdlg_lbfgs,
  'dga': dga,
  'gia': gia,
  'gs': gs,
  'ladder': ladder,
  'annealed': annealed,
  'prefix': prefix,
  'cinet': cinet,
  'magia': magia,
  'ggl': ggl,
  'gias': gias,
  'gifd': gifd,
  'pnp': pnp,
  'bayes': bayes,
  'fidel': fidel,
  'fidel_decoder': fidel_decoder,
  'lti': lti,
  'peeling': peeling,
  'residual_peeling': residual_peeling,
  'spear': spear,
  'span': span,
  'tableak': tableak,
  'linear': linear,
  'april': april,
  'tag': tag,
  'lamp': lamp,
}

__all__ = [
  'EVIDENCE',
  'REGISTRY',
  'Attack',
  'AttackMethod',
  'Reconstruction',
  'annealed',
  'april',
  'as_attack',
  'attack',
  'bayes',
  'cinet',
  'closed_form',
  'csdlg',
  'csdlg_fast',
  'csdlg_lbfgs',
  'dga',
  'dlg',
  'fidel',
  'fidel_decoder',
  'ggl',
  'gia',
  'gias',
  'gifd',
  'gradient_matching',
  'gs',
  'host_form',
  'idlg',
  'labels',
  'ladder',
  'lamp',
  'linear',
  'lti',
  'magia',
  'peeling',
  'pnp',
  'prefix',
  'residual_peeling',
  'span',
  'spear',
  'tableak',
  'tag',
  'wrap',
]
