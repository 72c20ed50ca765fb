"""Targets of a job's curves: TensorBoard, Weights & Biases, MLflow, or a logger of your own.

    world.log_to(lambda: TensorBoardLogger("runs/one"), hyperparams={"lr": 3e-4})
    ...
    world.report(loss=loss.item())      # logged by the main process, at the committed version

Each library is imported when its logger is made, and is an extra: `axon-ps[tensorboard]`, `[wandb]`, `[mlflow]`.
"""

from axon_ps.observe.loggers.base import Logger
from axon_ps.observe.loggers.mlflow import MLflowLogger
from axon_ps.observe.loggers.tensorboard import TensorBoardLogger
from axon_ps.observe.loggers.wandb import WandbLogger

__all__ = ["Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
