"""The values of a run for trackers: TensorBoard, W&B, MLflow, Trackio, Prometheus.

``tracker``              what a tracker is, and the run that it tracks
``tracked_values``       the numbers of a line of ``metrics.jsonl``, under flat names
``tensorboard``          event files
``wandb``                Weights & Biases
``mlflow``               MLflow
``trackio``              Trackio
``prometheus``           the text format of Prometheus, in a file
``prometheus_endpoint``  the same over HTTP
``known_trackers``       these by name
``tracker_thread``       the thread that a tracker works on
``tracking``             all trackers of a run, and a finished run sent to them
"""
