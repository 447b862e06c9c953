"""Defenses by name, and the chains that a user writes down."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import optax

from gradleak import errors, specs
from gradleak.defenses import base, clipping, compression, control, differential_privacy, noise, samples
from gradleak.defenses.concealment import concealment
from gradleak.defenses.fragmentation import fragmentation, fragmentation_random
from gradleak.defenses.graddefense import graddefense, graddefense_step
from gradleak.defenses.graddefense import prepare as prepare_graddefense
from gradleak.defenses.outpost import outpost
from gradleak.defenses.soteria import soteria


class Entry(NamedTuple):
  """A defense by name.

  Attributes:
    factory: (*arguments, **settings) -> an optax transformation, or for 'data' a function (key, images, labels) ->
      (images, labels). Its keyword-only parameters are the settings.
    place: 'data' (on the samples), 'step' (on the gradient of each local step) or 'upload' (on what is sent).
    arguments: (Context, settings) -> the factory's positional arguments, computed once, on the host. Without a context
      they are missing; factories check their settings all the same.
  """

  factory: Callable
  place: str = 'upload'
  arguments: Callable = lambda context, settings: ()


@dataclasses.dataclass(frozen=True)
class Context:
  """What a defense may be made for; a defense says what it lacks.

  Attributes:
    client: the undefended `Client`.
    variables: the global model's.
    image_shape: (H, W, C).
    public: (images, labels) that everyone holds, float32 [K, H, W, C] and int32 [K], or None.
    previous: variables of the model that this client was sent before, or None at its first participation.
  """

  client: object
  variables: object
  image_shape: tuple[int, ...]
  public: tuple | None = None
  previous: object = None

  @property
  def layers(self):
    """The model's layers, or None where it does not offer them."""
    offered = self.client.model.layers
    return None if offered is None else offered(self.image_shape)


ENTRIES = {
  'gaussian': Entry(noise.gaussian),
  'laplace': Entry(noise.laplace),
  'prune': Entry(compression.prune),
  'topk': Entry(compression.topk),
  'dgc': Entry(compression.dgc),
  'fragmentation': Entry(
    fragmentation,
    arguments=lambda context, settings: (
      context.layers,
      context.client.share,
      None if context.previous is None else context.previous['params'],
    ),
  ),
  'fragmentation_random': Entry(fragmentation_random, arguments=lambda context, settings: (context.layers,)),
  'clip': Entry(clipping.clip),
  'client_dp': Entry(differential_privacy.client_dp),
  'clip_samples': Entry(differential_privacy.clip_samples, 'step', lambda context, settings: (context.client,)),
  'dpsgd': Entry(differential_privacy.dpsgd, 'step', lambda context, settings: (context.client,)),
  'null_gradient': Entry(control.null_gradient),
  'concealment': Entry(concealment, 'step', lambda context, settings: (context.client, context.public)),
  'graddefense': Entry(graddefense, 'upload', prepare_graddefense),
  'graddefense_step': Entry(graddefense_step, 'step', lambda context, settings: (context.client,)),
  'outpost': Entry(outpost, 'step', lambda context, settings: (context.layers,)),
  'soteria': Entry(soteria, 'step', lambda context, settings: (context.client.model,)),
  'ats': Entry(samples.ats, 'data'),
  'instahide': Entry(samples.instahide, 'data', lambda context, settings: (samples.require_public(context.public),)),
}
REGISTRY = {name: entry.factory for name, entry in ENTRIES.items()}


class Defense(NamedTuple):
  """A chain of defenses as written by a user, apart from its numbers, which are traced.

  Attributes:
    name: the canonical text.
    structure: what decides the compilation; hashable.
    numbers: the numeric settings, a tuple of floats.
    build: (numbers, client) -> the client under this defense.
    members: one `Member` per part of the chain, in order; empty for 'none' and for transformations of a user's own.
  """

  name: str
  structure: tuple
  numbers: tuple[float, ...]
  build: Callable
  members: tuple = ()


class Member(NamedTuple):
  """One part of a chain.

  Attributes:
    name: its name in the registry.
    settings: all its settings, defaults included.
    arguments: what it was made for, the factory's positional arguments.
  """

  name: str
  settings: dict
  arguments: tuple


def parse(text, context=None):
  """Returns the `Defense` that `text` describes: 'none', 'prune(rate=0.9)', 'clip(norm=1)+gaussian(stddev=0.1)'.

  Each member acts at its own place: on the samples, on the gradient of each local step, or on what is about to be
  sent. Those of one place act in the order written.

  Args:
    text: as a user writes it.
    context: the `Context` that it is made for; without it, only the settings are checked.

  Raises:
    UsageError: for an unknown name or setting, a value out of range, or a context that lacks what it needs.
  """
  chain = specs.parse_chain(text, 'defense')
  if any(spec.name == 'none' for spec in chain):
    if len(chain) > 1 or chain[0].settings:
      raise errors.UsageError(f"'none' stands alone, got {text!r}")
    return Defense('none', (), (), lambda numbers, client: client)
  templates = [specs.template(spec, REGISTRY, 'defense') for spec in chain]
  for template in templates:  # range errors now, not while tracing
    template.build(template.numbers)
  entries = [ENTRIES[spec.name] for spec in chain]
  settings = [template.settings for template in templates]
  arguments = [
    () if context is None else entry.arguments(context, set_) for entry, set_ in zip(entries, settings, strict=True)
  ]

  def build(numbers, client):
    numbers, made = iter(numbers), {'data': [], 'step': [], 'upload': []}
    for template, entry, given in zip(templates, entries, arguments, strict=True):
      made[entry.place].append(template.build([next(numbers) for _ in template.numbers], *given))
    if len(made['data']) > 1:
      raise errors.UsageError(f'{text!r} transforms the samples twice; one such defense is possible')
    return dataclasses.replace(
      client,
      transform=made['data'][0] if made['data'] else client.transform,
      step=base.chain(*made['step']) if made['step'] else client.step,
      upload=base.chain(*made['upload']) if made['upload'] else client.upload,
    )

  return Defense(
    '+'.join(map(str, chain)),
    tuple(template.structure for template in templates),
    tuple(number for template in templates for number in template.numbers),
    build,
    tuple(Member(spec.name, set_, given) for spec, set_, given in zip(chain, settings, arguments, strict=True)),
  )


def custom(name, transformation):
  """Returns the `Defense` of a user's own optax transformation on what is about to be sent.

  Raises:
    UsageError: if it is none.
  """
  if not isinstance(transformation, optax.GradientTransformation):
    raise errors.UsageError(
      f'the defense {name!r} is {transformation!r}, expected a text or an optax transformation, such as optax.clip(1.0)'
    )
  return Defense(
    name, (name, id(transformation)), (), lambda numbers, client: dataclasses.replace(client, upload=transformation)
  )
