"""The defense that a text describes."""

from gradleak.core import errors
from gradleak.core.grammar import Spec, parse_chain
from gradleak.defenses import NO_DEFENSE, REGISTRY, chain
from gradleak.defenses.defense import Defense


def parse(text: str) -> Defense:
  """Returns the defense that a text describes, as 'none' or 'clip(norm=1)+gaussian(stddev=0.01)'.

  Raises:
    UsageError: for a text of another form, an unknown name or setting, or a value out of range.
  """
  specs = parse_chain(text, 'defense')
  if specs == (Spec('none'),):
    return NO_DEFENSE
  if any(each.name == 'none' for each in specs):
    raise errors.UsageError(f"'none' stands alone, got {errors.shown(text)}")
  for each in specs:
    errors.check_choice('defense', each.name, {'none': None, **REGISTRY})  # so that errors list it
  return chain(*(REGISTRY[each.name](**dict(each.settings)) for each in specs))
