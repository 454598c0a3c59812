"""FedAvg in fluke: `FedAVG` on a fixed assignment of records, in one process."""

import time

from common import Task
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.evaluation import ClassificationEval

task = Task()
settings = task.settings
classes = settings["network"]["classes"]
loaders = [
    FastDataLoader(*client, num_labels=classes, batch_size=settings["batch_size"], shuffle=True)
    for client in task.clients
]
environment = FlukeENV()
environment.set_seed(settings["seed"])
environment.set_device("cpu")
environment.set_inmemory(True)
environment.set_evaluator(ClassificationEval(settings["rounds"], classes))
environment.set_eval_cfg(locals=False, server=False, pre_fit=False, post_fit=False)
began = time.time()
algorithm = FedAVG(
    len(loaders),
    DataSplitter(DummyDataContainer(loaders, [None] * len(loaders), None, classes)),
    DDict(
        client={
            "batch_size": settings["batch_size"],
            "local_epochs": settings["epochs"],
            "loss": "CrossEntropyLoss",
            "optimizer": {"name": "SGD", "lr": settings["learning_rate"]},
            "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
        },
        server={"weighted": True},
        model=task.network(),
    ),
)
algorithm.run(settings["rounds"], 1.0)
task.finish(algorithm.server.model, began)
