"""FedAvg in Flower: its own strategy and simulation, with a lean app in one file."""

import os
import time

import common
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train for a round from the average."""
    task, client = common.task(), int(context.node_config["partition-id"])
    settings, network, (images, labels) = task.settings, task.network(), task.clients[client]
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(network.parameters(), settings["learning_rate"])
    for _ in range(settings["epochs"]):
        for chosen in torch.randperm(len(labels)).split(settings["batch_size"]):
            loss = torch.nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    arrays = ArrayRecord(network.state_dict())
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Average for all rounds, and write the result."""
    task = common.task()
    network, clients, rounds = task.network(), len(task.clients), task.settings["rounds"]
    grid.pull_interval = 0.005  # as in FedDPSD; the default of 0.1 s would delay rounds
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    while len(list(grid.get_node_ids())) < clients:
        time.sleep(0.1)
    began = time.time()
    trained = strategy.start(grid, ArrayRecord(network.state_dict()), num_rounds=rounds)
    if len(trained.train_metrics_clientapp) < rounds:
        raise RuntimeError("a client failed")  # Flower continues without it
    network.load_state_dict(trained.arrays.to_torch_state_dict())
    task.finish(network, began)


if __name__ == "__main__":
    os.environ[common.VARIABLE] = str(common.FOLDER)  # for the clients' processes
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, len(common.task().clients), backend_config=backend)
    os._exit(0)  # a thread of Flower may still be waiting
