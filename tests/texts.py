"""Small networks and scenarios on synthetic notes, for tests."""

import functools

import jax
import numpy as np

import gradleak as gl
from gradleak.modalities import of_config

LENGTH = 10


@functools.cache
def notes(number=101, split='test', tokeniser='words', length=LENGTH):
  return gl.data.load('notes', split, limit=number, tokeniser=tokeniser, length=length)


@functools.cache
def network(head='next', kind='gpt', tokeniser='words', length=LENGTH, **settings):
  """Returns (model, number of outputs) of a network for the notes."""
  known = notes(2, tokeniser=tokeniser, length=length).known
  outputs = known['vocabulary'] if head in ('next', 'masked') else len(gl.data.notes.CLASS_NAMES)
  made = {'width': 16, 'layers': 1, 'head': head, **({} if kind == 'lstm' else {'heads': 2}), **settings}
  if kind == 'lstm':
    known = {name: value for name, value in known.items() if name != 'length'}
  return getattr(gl.models, kind)(outputs, 'default', **known, **made), outputs


def scenario(loss='next_token', head='next', kind='gpt', number=101, tokeniser='words', length=LENGTH, **settings):
  data = notes(number, tokeniser=tokeniser, length=length)
  public = notes(60, 'train', tokeniser, length)
  return gl.scenario(
    network(head, kind, tokeniser, length)[0],
    data.samples,
    data.targets,
    key=jax.random.key(0),
    modality=of_config(data.settings),
    loss=loss,
    public=(public.samples, public.targets),
    dataset='notes',
    **settings,
  )


def one_hot(ids, size):
  return np.eye(size, dtype=np.float32)[np.asarray(ids)]
