"""What is known of methods, as an audit's `AuditResult.methods` holds it, from texts or objects."""

import gradleak as gl
from gradleak.audit.result import facts
from gradleak.defenses.defense import as_defense


def of_defense(entry, epochs=1):
  """Returns the facts of a defense, an object or a text."""
  return facts(as_defense(gl.parse(entry) if isinstance(entry, str) else entry), epochs)


def of_defenses(entries, epochs=1):
  """Returns the facts of a list of texts or a dict of objects, as `AuditResult.methods` holds them."""
  named = entries if isinstance(entries, dict) else {text: text for text in entries}
  return {'defenses': {label: of_defense(entry, epochs) for label, entry in named.items()}}


def methods(attacks=(), defenses=(), model=()):
  """Returns the facts of attacks and defenses (texts), and of a model with some citations."""
  return {
    'attacks': {text: {'citations': [gl.parse(text).citation]} for text in attacks},
    **of_defenses(defenses),
    'model': {'citations': list(model)},
  }
