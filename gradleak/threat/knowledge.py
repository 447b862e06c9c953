"""What an attacker is granted."""

import dataclasses

from gradleak.core import errors

LABELS = ('known', 'inferred', 'optimised')

_VALID = {
  'labels': ('label mode', (*LABELS, 'unused')),
  'share': ('share', ('gradient', 'delta')),
  'batch_norm': ('batch_norm mode', ('none', 'train', 'eval')),
  'defense': ('defense knowledge', ('none', 'unknown', 'known', 'either')),
  'model': ('model state', ('honest', 'modified')),
}

TIERS = {
  'A': 'eavesdropper: the update and the model',
  'B': 'informed eavesdropper: and the labels of the private samples',
  'C': 'parameter-aware eavesdropper: and how the client trains (local steps, batches, learning rate)',
  'D': 'data-enhanced eavesdropper: and auxiliary data of the same kind',
  'E': 'statistically informed eavesdropper: and statistics of the private data',
  'F': 'active manipulator: sends a modified model',
  'G': 'data-enhanced manipulator: a modified model and auxiliary data',
  'H': 'active client manipulator: and chooses or isolates its clients',
}


@dataclasses.dataclass(frozen=True)
class Knowledge:
  """What an attacker is granted; recorded with every result. Hashable: it decides the compilation.

  Attributes:
    labels: 'known' (given), 'inferred' (from the update, before the attack), 'optimised' (with the samples), or
      'unused' by closed forms that need none.
    label_inference: the rule of 'inferred', a name of `gradleak.attacks.labels.RULES`.
    local_steps: number of local steps behind the update.
    share: 'gradient' or 'delta'.
    batch_norm: 'train' or 'eval', how the client ran BatchNorm, if the model has any ('none').
    defense: 'none' where the client has none; 'unknown', 'known', or 'either' where attackers of both kinds run in one
      program: they then differ in the evidence only.
    model: 'honest' or 'modified'.
    auxiliary_data: number of samples of the same kind that the attacker holds.
    prior: a sentence on what else it learned of samples, from a file.
    training: a sentence on what the attacker knows, or assumes, of local training.
    cohort: number of clients whose mean update is all that it sees.
    running: whether it simulates BatchNorm on the running statistics that were sent, whatever the client does.
  """

  labels: str = 'known'
  label_inference: str = 'bias_corrected'
  local_steps: int = 1
  share: str = 'gradient'
  batch_norm: str = 'none'
  defense: str = 'unknown'
  model: str = 'honest'
  auxiliary_data: int = 0
  prior: str = ''
  training: str = ''
  cohort: int = 1
  running: bool = False

  def __post_init__(self) -> None:
    for field, (kind, valid) in _VALID.items():
      errors.check_choice(kind, getattr(self, field), valid)
    errors.check_number('local_steps', self.local_steps, low=1, integer=True)
    errors.check_number('auxiliary_data', self.auxiliary_data, low=0, integer=True)

  @property
  def tier(self) -> str:
    """The corresponding threat model of Carletti et al. (SoK, USENIX Security 2025), A–H, as we read it."""
    if self.model == 'modified':
      return 'G' if self.auxiliary_data or self.prior else 'F'
    if self.auxiliary_data or self.prior:
      return 'D'
    if self.local_steps > 1 or self._trained:  # one step has a learning rate and a batch as well
      return 'C'
    return 'B' if self.labels == 'known' else 'A'

  @property
  def _trained(self) -> str:
    """What it knows of local training, which a gradient says nothing of."""
    return self.training if self.share == 'delta' else ''

  def in_words(self) -> list[str]:
    """Returns the threat model as a list of sentences."""
    label = {
      'known': 'It is given the true labels of the private samples.',
      'inferred': f'It infers the labels from the update by the rule {self.label_inference!r}; they are not given.',
      'optimised': 'It is given no labels and optimises them together with the samples.',
      'unused': 'It is given no labels, and needs none.',
    }[self.labels]
    server = (
      'The server is honest but curious: it sends the genuine model and reads what comes back.'
      if self.model == 'honest'
      else 'The server is malicious: it sends a modified model.'
    )
    steps = '1 local step' if self.local_steps == 1 else f'{self.local_steps} local steps'
    sees = {
      'gradient': 'It sees the gradient of one step on the private samples, as the client sent it.',
      'delta': f'It sees the difference of the weights after {steps}, as the client sent it.',
    }[self.share]
    training = [self._trained] if self._trained else []
    same = 'simulates the same and is given no statistics'
    simulated = 'simulates it on the running statistics that it sends' if self.running else same
    norm = {
      'none': [],
      'train': [f'The client runs BatchNorm on batch statistics; the attacker {simulated}.'],
      'eval': ['The client runs BatchNorm on the running statistics of the global model, which the server knows.'],
    }[self.batch_norm]
    defense = {
      'none': 'The client uses no defense.',
      'unknown': 'It does not know which defense the client uses, and ignores it.',
      'known': 'It knows the defense and its settings.',
      'either': 'One attacker does not know which defense the client uses, and ignores it. Another knows the defense '
      'and its settings.',
    }[self.defense]
    held = f'{self.auxiliary_data:,} {"sample" if self.auxiliary_data == 1 else "samples"}'
    data = f'It holds auxiliary data of the same kind, {held}.' if self.auxiliary_data else self.prior
    data = data or 'It holds no auxiliary data.'
    count = (
      'It knows the number of private samples, the weights of the model, the loss, and the shape and range of samples.'
    )
    tier = f'Threat model {self.tier} of Carletti et al. (2025), as we read it: {TIERS[self.tier]}.'
    together = [f'Secure aggregation shows it the mean of {self.cohort} such updates alone.'] if self.cohort > 1 else []
    return [server, sees, *together, *training, count, label, *norm, defense, data, tier]
