"""The engine: functions of one lane, compiled once and run over all, whatever they attack or train."""

from gradleak.engine.driver import Progress, evaluate, run

__all__ = ['Progress', 'evaluate', 'run']
