"""FedAvg in APPFL: a server agent and client agents in one process, which train in turn."""

import time

import common
from appfl.agent import ServerAgent
from appfl.agent.sim_client import SimClientAgent
from omegaconf import OmegaConf
from torch.utils.data import TensorDataset

task = common.Task()
settings = task.settings
own = {"logging_output_dirname": str(common.FOLDER / "logs"), "optimize_memory": False}


def client_configs() -> dict:
    """Return the settings of a client; agents change theirs."""
    return {
        "train_configs": {
            "trainer": "VanillaTrainer",
            "mode": "epoch",
            "num_local_epochs": settings["epochs"],
            "optim": "SGD",
            "optim_args": {"lr": settings["learning_rate"]},
            "loss_fn": "CrossEntropyLoss",
            "metric_path": common.__file__,
            "metric_name": "share_right",
            "train_batch_size": settings["batch_size"],
            **own,
        },
        "model_configs": {
            "model_path": common.__file__,
            "model_name": "Network",
            "model_kwargs": settings["network"],
        },
    }


server = ServerAgent(
    OmegaConf.create(
        {
            "client_configs": client_configs(),
            "server_configs": {
                "num_clients": len(task.clients),
                "num_global_epochs": settings["rounds"],
                "scheduler": "SyncScheduler",
                "scheduler_kwargs": {"same_init_model": True},
                "aggregator": "FedAvgAggregator",
                "aggregator_kwargs": {
                    "client_weights_mode": "sample_size",
                    "optimize_memory": False,
                },
                **own,
            },
        }
    )
)
agents = [
    SimClientAgent(client_configs(), str(number), TensorDataset(*records))
    for number, records in enumerate(task.clients)
]
for agent in agents:
    server.set_sample_size(agent.get_id(), agent.get_sample_size())
began = time.time()
for _ in range(settings["rounds"]):
    parameters = server.get_parameters(serial_run=True)
    for agent in agents:
        agent.load_parameters(parameters)
        agent.train()
        local = agent.get_parameters()
        model, about = local if isinstance(local, tuple) else (local, {})
        server.global_update(agent.get_id(), model, **about)
network = task.network()
network.load_state_dict(server.get_parameters(serial_run=True))
task.finish(network, began)
