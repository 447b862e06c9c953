"""The engine compiles functions of one lane once and runs them over all lanes, for attacks and for training."""

from gradleak.engine.driver import Progress, evaluate, run

__all__ = ['Progress', 'evaluate', 'run']
