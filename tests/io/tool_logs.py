# ruff: noqa: E501  # lines as long as the tools write them
"""Logs in the forms in which tools write them: name of the file, text, steps, and values by monitor."""

NAN = float("nan")

#: Name of a case -> file name, text, steps, values of monitors; all others are absent.
LOGS = {
    "Megatron-LM": (
        "slurm-1.out",
        "[before the start of training step] datetime: 2024-10-31 08:35:51 \n"
        " iteration        1/    2000 | consumed samples:          256 | elapsed time per iteration (ms): 9356.2 | learning rate: 3.000000E-06 | global batch size:   256 | lm loss: 1.082931E+01 | loss scale: 1.0 | grad norm: 6.132 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        "Number of parameters in billions: 1.3\n"
        " [2024-10-31 08:36:02] iteration        2/    2000 | consumed samples:          512 | elapsed time per iteration (ms): 356.2 | learning rate: 6.000000E-06 | global batch size:   256 | lm loss: 1.071234E+01 | loss scale: 1.0 | grad norm: 5.010 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        "-----------------------------------------------------------------------------------------------\n"
        " validation loss at iteration 2 | lm loss value: 1.069000E+01 | lm loss PPL: 4.3910E+04 | \n"
        "-----------------------------------------------------------------------------------------------\n"
        " [2024-10-31 08:36:03] iteration        3/    2000 | consumed samples:          768 | elapsed time per iteration (ms): 350.0 | learning rate: 9.000000E-06 | global batch size:   256 | lm loss: NAN | loss scale: 1.0 | grad norm: inf | number of skipped iterations:   0 | number of nan iterations:   1 |\n",
        [1, 2, 3],
        {"loss": [10.82931, 10.71234, NAN], "grad_norm": [6.132, 5.01, float("inf")], "learning_rate": [3e-6, 6e-6, 9e-6], "batch_size": [256] * 3},
    ),
    "GPT-NeoX with DeepSpeed": (
        "neox.txt",
        "[2023-01-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[3e-06, 3e-06], mom=[[0.9, 0.95], [0.9, 0.95]]\n"
        "steps: 10 loss: 10.5432 iter time (s): 1.234 samples/sec: 12.345\n"
        " samples/sec: 12.3 | iteration       10/  320000 | elapsed time per iteration (ms): 1234.5 | learning rate: 3.000E-06 | approx flops per GPU: 45.6TFLOPS | lm_loss: 1.054320E+01 | loss scale: 65536.0 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        "[2023-01-01 10:00:12,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=0, lr=[6e-06, 6e-06], mom=[[0.9, 0.95], [0.9, 0.95]]\n"
        "steps: 20 loss: 9.5432 iter time (s): 1.234 samples/sec: 12.345\n"
        " samples/sec: 12.3 | iteration       20/  320000 | elapsed time per iteration (ms): 1234.5 | learning rate: 6.000E-06 | approx flops per GPU: 45.6TFLOPS | lm_loss: 9.543200E+00 | loss scale: 65536.0 | number of skipped iterations:   0 | number of nan iterations:   0 |\n",
        [10, 20],
        {"loss": [10.5432, 9.5432], "learning_rate": [3e-6, 6e-6]},
    ),
    "DeepSpeed-Chat": (
        "training.log",
        "Epoch: 0, Step: 10, Rank: 0, loss = 2.5\n"
        "Model Parameters: 1.316 B, Latency: 0.51s, TFLOPs: 30.1, Samples/sec: 15.7, Time/seq 0.06s, Batch Size: 8, Sequence Length: 512\n"
        "Epoch: 0, Step: 20, Rank: 0, loss = 2.25\n",
        [10, 20],
        {"loss": [2.5, 2.25], "batch_size": [8, NAN]},
    ),
    "torchtitan in color": (
        "titan.log",
        "[rank0]:[titan] 2025-06-16 22:30:50,322 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2500  \x1b[38;2;180;60;0mgrad_norm:  1.5000  \x1b[38;2;54;234;195mmemory: 49.66GiB(52.28%)  \x1b[34mtps: 5,856  \x1b[36mtflops: 339.16  \x1b[35mmfu: 34.29%\x1b[39m\n"
        "[rank0]:[titan] 2025-06-16 22:31:50,322 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss: 10.1250  \x1b[38;2;180;60;0mgrad_norm:  2.5000  \x1b[38;2;54;234;195mmemory: 49.66GiB(52.28%)  \x1b[34mtps: 5,856  \x1b[36mtflops: 339.16  \x1b[35mmfu: 34.29%\x1b[39m\n"
        "[rank0]:[titan] 2025-06-16 22:31:51,322 - root - INFO - \x1b[36mvalidate step: 10  \x1b[32mloss: 10.5000  \x1b[33mmemory: 49.66GiB(52.28%)\x1b[39m\n"
        "[rank0]:[titan] 2025-06-16 22:32:50,322 - root - INFO - \x1b[31mstep: 20  \x1b[32mloss:  9.0000  \x1b[38;2;180;60;0mgrad_norm:  3.5000  \x1b[38;2;54;234;195mmemory: 49.66GiB(52.28%)  \x1b[34mtps: 5,856  \x1b[36mtflops: 339.16  \x1b[35mmfu: 34.29%\x1b[39m\n",
        [1, 10, 20],
        {"loss": [12.25, 10.125, 9.0], "grad_norm": [1.5, 2.5, 3.5]},
    ),
    "torchtune": (
        "log_1700000000.txt",
        "Step 1 | loss:2.25 lr:2e-05 tokens_per_second_per_gpu:512.5 grad_norm:1.5 \n"
        "Step 2 | loss:2.125 lr:4e-05 tokens_per_second_per_gpu:510.5 grad_norm:1.25 \n",
        [1, 2],
        {"loss": [2.25, 2.125], "learning_rate": [2e-5, 4e-5], "grad_norm": [1.5, 1.25]},
    ),
    "fairseq": (
        "train.log",
        "2021-01-01 10:00:00 | INFO | train_inner | epoch 001:    100 / 1000 loss=10, ppl=1024, wps=19456.3, ups=2.1, wpb=9000.1, bsz=312.5, num_updates=100, lr=1.25e-05, gnorm=2.5, clip=0, train_wall=30, wall=50\n"
        "2021-01-01 10:01:00 | INFO | train_inner | epoch 001:    200 / 1000 loss=8, ppl=256, wps=19456.3, ups=2.1, wpb=9000.1, bsz=312.5, num_updates=200, lr=2.5e-05, gnorm=1.5, clip=0, train_wall=30, wall=80\n"
        "2021-01-01 10:02:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 7.5 | ppl 181 | wps 1000 | num_updates 200\n",
        [100, 200],
        {"loss": [6.931472, 5.545177], "learning_rate": [1.25e-5, 2.5e-5], "grad_norm": [2.5, 1.5]},
    ),
    "metaseq": (
        "train.log",
        '2022-03-10 12:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.01, "loss": "11", "ppl": "2048", "wps": "0", "num_updates": "25", "lr": "1e-05", "gnorm": "3.5", "loss_scale": "4", "clip": "100", "wall": "50"}\n'
        '2022-03-10 12:01:00 | INFO | train_inner | {"epoch": 1, "update": 0.02, "loss": "9", "ppl": "512", "wps": "900", "num_updates": "50", "lr": "2e-05", "gnorm": "2.5", "loss_scale": "4", "clip": "100", "wall": "80"}\n'
        '2022-03-10 12:01:09 | INFO | valid | {"epoch": 1, "valid_loss": "8.5", "valid_ppl": "362", "valid_num_updates": "50"}\n',
        [25, 50],
        {"loss": [7.624619, 6.238325], "learning_rate": [1e-5, 2e-5], "grad_norm": [3.5, 2.5]},
    ),
    "LLaMA-Factory": (
        "trainer_log.jsonl",
        '{"current_steps": 10, "total_steps": 30, "loss": 1.5, "lr": 4.5e-05, "epoch": 0.1, "percentage": 33.3, "elapsed_time": "0:00:30", "remaining_time": "0:01:00"}\n'
        '{"current_steps": 20, "total_steps": 30, "loss": 1.25, "lr": 2.5e-05, "epoch": 0.2, "percentage": 66.7, "elapsed_time": "0:01:00", "remaining_time": "0:00:30"}\n'
        '{"current_steps": 20, "total_steps": 30, "eval_loss": 1.375, "epoch": 0.2, "percentage": 66.7, "elapsed_time": "0:01:00", "remaining_time": "0:00:30"}\n'
        '{"current_steps": 30, "total_steps": 30, "epoch": 0.3, "percentage": 100.0, "elapsed_time": "0:01:30", "remaining_time": "0:00:00"}\n',
        [10, 20],
        {"loss": [1.5, 1.25], "learning_rate": [4.5e-5, 2.5e-5]},
    ),
    "LitGPT": (
        "litgpt.log",
        "Epoch 1 | iter 1 step 1 | loss train: 10.5, val: n/a | iter time: 350.12 ms (step) remaining time: 1:23:45\n"
        "Epoch 1 | iter 2 step 2 | loss train: 10.25, val: n/a | iter time: 349.12 ms (step) remaining time: 1:23:40\n"
        "Validating ...\n"
        "iter 2: val loss 10.3125, val time: 1234.56 ms\n"
        "Epoch 1 | iter 3 step 3 | loss train: 10.125, val: 10.312 | iter time: 349.12 ms (step) remaining time: 1:23:40\n",
        [1, 2, 3],
        {"loss": [10.5, 10.25, 10.125]},
    ),
    "Keras's CSVLogger": (
        "training.csv",
        "epoch,accuracy,loss,val_accuracy,val_loss\n0,0.5,2.25,0.5,2.125\n1,0.625,2.0,0.625,2.0\n",
        [0, 1],
        {"loss": [2.25, 2.0], "accuracy": [0.5, 0.625]},
    ),
    "Keras's progress": (
        "keras.txt",
        "Epoch 1/5\n"
        "1875/1875 [==============================] - 5s 3ms/step - loss: 0.25 - accuracy: 0.9151 - val_loss: 0.14 - val_accuracy: 0.9574\n"
        "Epoch 2/5\n"
        "1875/1875 [==============================] - 5s 3ms/step - loss: 0.125 - accuracy: 0.9574 - val_loss: 0.10 - val_accuracy: 0.9674\n",
        [1, 2],
        {"loss": [0.25, 0.125], "accuracy": [0.9151, 0.9574]},
    ),
    "NeMo 2": (
        "nemo.out",
        "Training epoch 0, iteration 8/99 | lr: 2.5e-05 | global_batch_size: 8 | global_step: 8 | reduced_train_loss: 11.25 | train_step_timing in s: 1.234 | consumed_samples: 72\n"
        "Training epoch 0, iteration 9/99 | lr: 5e-05 | global_batch_size: 8 | global_step: 9 | reduced_train_loss: 11.125 | train_step_timing in s: 1.234 | consumed_samples: 80 | val_loss: 11.2\n",
        [8, 9],
        {"loss": [11.25, 11.125], "learning_rate": [2.5e-5, 5e-5], "batch_size": [8, 8]},
    ),
    "NeMo 1": (
        "nemo_log.txt",
        "Epoch 0: :   1%|          | 10/1000 [00:20<33:00, v_num=1-2, reduced_train_loss=10.50, global_step=9.000, consumed_samples=80.00, train_step_timing in s=1.230]\r"
        "Epoch 0: :   1%|          | 20/1000 [00:40<33:00, v_num=1-2, reduced_train_loss=9.500, global_step=19.00, consumed_samples=160.0, train_step_timing in s=1.230]\n",
        [9, 19],
        {"loss": [10.5, 9.5]},
    ),
    "Composer's console": (
        "composer.txt",
        "[batch=1/10]:\n\t Train time/epoch: 0\n\t Train time/batch: 0\n\t Train trainer/device_train_microbatch_size: 8\n\t Train loss/train/total: 10.75\n\t Train metrics/train/LanguageCrossEntropy: 10.7\n\t Train l2_norm/grad/global: 1.5\n\t Train lr-DecoupledAdamW/group0: 0.0001\n"
        "[batch=2/10]:\n\t Train time/epoch: 0\n\t Train time/batch: 1\n\t Train trainer/device_train_microbatch_size: 8\n\t Train loss/train/total: 10.5\n\t Train metrics/train/LanguageCrossEntropy: 10.6\n\t Train l2_norm/grad/global: 1.25\n\t Train lr-DecoupledAdamW/group0: 0.0002\n",
        [1, 2],
        {"loss": [10.7, 10.6], "learning_rate": [1e-4, 2e-4], "grad_norm": [1.5, 1.25]},
    ),
    "OLMo-core": (
        "olmo.log",
        "2025-01-01 10:00:00.123\thost-1:0\tolmo_core.train.callbacks.console_logger:91\tINFO\t[step=10/1000,epoch=1,eta=1:00:00]\n    train/CE loss=10.83\n    train/PPL=50,514\n    optim/total grad norm=1.25\n    optim/LR (group 0)=1.5e-05\n    throughput/total tokens=41,943,040\n"
        "2025-01-01 10:01:00.123\thost-1:0\tolmo_core.train.callbacks.console_logger:91\tINFO\t[step=20/1000,epoch=1,eta=0:59:00]\n    train/CE loss=9.5\n    train/PPL=13,360\n    optim/total grad norm=1.5\n    optim/LR (group 0)=3e-05\n    throughput/total tokens=83,886,080\n",
        [10, 20],
        {"loss": [10.83, 9.5], "learning_rate": [1.5e-5, 3e-5], "grad_norm": [1.25, 1.5]},
    ),
    "nanochat": (
        "base.log",
        "Step 00000 | Validation bpb: 3.2130\n"
        "step 00000/21400 (0.00%) | loss: 11.090355 | grad norm: 0.5123 | lrm: 1.00 | dt: 9512.34ms | tok/sec: 55,123 | mfu: 2.61 | total time: 0.00m\n"
        "step 00001/21400 (0.00%) | loss: 10.812500 | grad norm: 0.6123 | lrm: 1.00 | dt: 512.34ms | tok/sec: 1,023,456 | mfu: 48.61 | total time: 0.00m\n",
        [0, 1],
        {"loss": [11.090355, 10.8125], "grad_norm": [0.5123, 0.6123]},
    ),
    "modded-nanogpt": (
        "run.txt",
        "step:0/1770 val_loss:10.8258 train_time:0ms step_avg:nanms\n"
        "step:1/1770 train_loss:10.75 train_time:120ms step_avg:120.32ms\n"
        "step:2/1770 train_loss:10.5 train_time:240ms step_avg:120.12ms\n"
        "step:2/1770 val_loss:10.4375 train_time:250ms step_avg:125.00ms\n",
        [1, 2],
        {"loss": [10.75, 10.5]},
    ),
    "nanoGPT": (
        "out.log",
        "tokens per iteration will be: 491,520\nstep 0: train loss 10.9375, val loss 10.9500\n"
        "iter 0: loss 10.9375, time 30123.45ms, mfu -100.00%\niter 10: loss 9.5000, time 245.11ms, mfu -100.00%\niter 20: loss 8.2500, time 245.11ms, mfu 33.40%\n",
        [0, 10, 20],
        {"loss": [10.9375, 9.5, 8.25]},
    ),
    "build-nanogpt": (
        "log.txt",
        "0 val 10.9511\n0 hella 0.2463\n0 train 10.955029\n1 train 10.6875\n2 train 10.4375\n",
        [0, 1, 2],
        {"loss": [10.955029, 10.6875, 10.4375]},
    ),
    "llm.c": (
        "main.log",
        "s:0 tel:11.0089\ns:1 trl:11.0093 lr:8.57e-07 norm:15.25\ns:2 trl:10.9375 lr:1.71e-06 norm:15.125\n",
        [1, 2],
        {"loss": [11.0093, 10.9375], "learning_rate": [8.57e-7, 1.71e-6], "grad_norm": [15.25, 15.125]},
    ),
    "makemore": (
        "makemore.txt",
        "      0/ 200000: 3.3221\n  10000/ 200000: 2.1900\n  20000/ 200000: 2.3700\n",
        [0, 10000, 20000],
        {"loss": [3.3221, 2.19, 2.37]},
    ),
    "MLflow": (
        "train_loss",
        "1700000000000 2.5 0\n1700000001000 2.25 1\n1700000002000 2.0 2\n",
        [0, 1, 2],
        {"loss": [2.5, 2.25, 2.0]},
    ),
    "Trainer's dicts with a progress bar": (
        "sft.log",
        "Map: 100%|##########| 1000/1000 [00:01<00:00, 900.1 examples/s]\n"
        "  0%|          | 0/60 [00:00<?, ?it/s]\r  8%|8         | 5/60 [00:05<00:55,  1.00s/it]\n{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 2e-05, 'epoch': 0.08}\n"
        " 17%|#6        | 10/60 [00:10<00:50,  1.00s/it]\n{'loss': 2.25, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.17}\n"
        "100%|##########| 20/20 [00:03<00:00, 6.1it/s]\n{'eval_loss': 2.3, 'eval_runtime': 3.2, 'eval_samples_per_second': 30.1, 'epoch': 0.17}\n"
        " 25%|##5       | 15/60 [00:15<00:45,  1.00s/it]\n{'loss': 2.0, 'grad_norm': 1.25, 'learning_rate': 0.0, 'epoch': 0.25}\n",
        [5, 10, 15],
        {"loss": [2.5, 2.25, 2.0], "grad_norm": [1.5, NAN, 1.25], "learning_rate": [2e-5, 1e-5, 0.0]},
    ),
    "Trainer's dicts alone": (
        "trainer.log",
        "".join(f"{{'loss': {3 - i / 8}, 'grad_norm': 1.5, 'learning_rate': 2e-05, 'epoch': {(i + 1) / 100}}}\n" for i in range(6)),
        [1, 2, 3, 4, 5, 6],
        {"loss": [3 - i / 8 for i in range(6)], "grad_norm": [1.5] * 6, "learning_rate": [2e-5] * 6},
    ),
    "a table of Trainer in a notebook": (
        "notebook.txt",
        "Step\tTraining Loss\tValidation Loss\n500\t2.5000\t2.6000\n1000\t2.2500\t2.4000\n1500\t2.0000\t2.3000\n",
        [500, 1000, 1500],
        {"loss": [2.5, 2.25, 2.0]},
    ),
    "Lightning's metrics.csv": (
        "metrics.csv",
        "epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss\n,0.001,9,,,\n0,,9,,2.5,\n,0.002,19,,,\n0,,19,,2.25,\n0,,19,,,2.3\n0,,19,2.375,,\n,0.003,29,,,\n1,,29,,2.0,\n",
        [9, 19, 29],
        {"loss": [2.5, 2.25, 2.0], "learning_rate": [0.001, 0.002, 0.003]},
    ),
    "ImageNet example of PyTorch": (
        "imagenet.log",
        "Epoch: [0][ 0/20]\tTime  9.512 (  9.512)\tData  1.012 (  1.012)\tLoss 7.0e+00 (7.0e+00)\tAcc@1   0.00 (  0.00)\n"
        "Epoch: [0][10/20]\tTime  0.512 (  0.600)\tData  0.012 (  0.012)\tLoss 6.5e+00 (6.8e+00)\tAcc@1   0.00 (  0.20)\n"
        "Epoch: [1][ 0/20]\tTime  0.512 (  0.600)\tData  0.012 (  0.012)\tLoss 6.0e+00 (6.0e+00)\tAcc@1   0.00 (  0.20)\n"
        "Epoch: [1][10/20]\tTime  0.512 (  0.600)\tData  0.012 (  0.012)\tLoss 5.5e+00 (5.8e+00)\tAcc@1   0.00 (  0.20)\n",
        [0, 10, 20, 30],
        {"loss": [7, 6.5, 6, 5.5]},
    ),
    "MMEngine's JSON": (
        "scalars.json",
        '{"lr": 0.001, "data_time": 0.1, "loss": 2.5, "grad_norm": 1.5, "time": 0.2, "epoch": 1, "iter": 50, "memory": 5000, "step": 50}\n'
        '{"lr": 0.001, "data_time": 0.1, "loss": 2.25, "grad_norm": 1.25, "time": 0.2, "epoch": 1, "iter": 100, "memory": 5000, "step": 100}\n',
        [50, 100],
        {"loss": [2.5, 2.25], "learning_rate": [0.001, 0.001], "grad_norm": [1.5, 1.25]},
    ),
    "MaxText": (
        "maxtext.log",
        "completed step: 0, seconds: 9.125, TFLOP/s/device: 10.1, Tokens/s/device: 500.5, total_weights: 65536, loss: 10.875\n"
        "completed step: 1, seconds: 1.125, TFLOP/s/device: 100.1, Tokens/s/device: 5000.5, total_weights: 65536, loss: 10.625\n",
        [0, 1],
        {"loss": [10.875, 10.625]},
    ),
    "verl": (
        "verl.log",
        "(TaskRunner pid=123) step:1 - global_seqlen/min:1024.000 - actor/entropy:0.500 - actor/pg_loss:-0.010 - actor/grad_norm:0.250 - actor/lr:1e-06 - critic/score/mean:0.125\n"
        "(TaskRunner pid=123) step:2 - global_seqlen/min:1024.000 - actor/entropy:0.490 - actor/pg_loss:0.020 - actor/grad_norm:0.375 - actor/lr:1e-06 - critic/score/mean:0.250\n",
        [1, 2],
        {"loss": [-0.01, 0.02], "grad_norm": [0.25, 0.375], "learning_rate": [1e-6, 1e-6]},
    ),
    "W&B's history as JSON lines": (
        "history.jsonl",
        '{"_step": 0, "_runtime": 1.5, "_timestamp": 1700000000.5, "train/loss": 2.5, "trainer/global_step": 9, "lr-AdamW/pg1": 0.001, "gradients/layer.0": {"_type": "histogram", "values": [1, 2]}}\n'
        '{"_step": 1, "_runtime": 2.5, "_timestamp": 1700000001.5, "val/loss": 2.4, "trainer/global_step": 9}\n'
        '{"_step": 2, "_runtime": 3.5, "_timestamp": 1700000002.5, "train/loss": "NaN", "trainer/global_step": 19, "lr-AdamW/pg1": 0.002}\n',
        [9, 19],
        {"loss": [2.5, NAN], "learning_rate": [0.001, 0.002]},
    ),
    "metrics by name and value": (
        "metrics.csv",
        "Run ID,key,value,step,timestamp\nabc,loss,2.5,0,1700000000\nabc,loss,2.25,1,1700000001\nabc,lr,0.1,0,1700000000\nabc,lr,0.2,1,1700000001\n",
        [0, 1],
        {"loss": [2.5, 2.25], "learning_rate": [0.1, 0.2]},
    ),
    "TensorBoard's download": (
        "run-exp-tag-train_loss.csv",
        "Wall time,Step,Value\n1700000000.5,0,2.5\n1700000001.5,10,2.25\n",
        [0, 10],
        {"loss": [2.5, 2.25]},
    ),
    "History of Keras": ("history.json", '{"loss": [2.5, 2.25, 2.0, 1.75, 1.5], "val_loss": [2.6, 2.5, 2.4, 2.3, 2.2]}', [1, 2, 3, 4, 5], {"loss": [2.5, 2.25, 2.0, 1.75, 1.5]}),
    "decimal commas": ("log.csv", "step;loss;lr\n0;2,5;0,001\n10;2,25;0,002\n", [0, 10], {"loss": [2.5, 2.25], "learning_rate": [0.001, 0.002]}),
    "timm, whose bar begins again": (
        "train.err",
        "Train: 0 [   0/100 (  0%)]  Loss: 6.95 (6.95)  Time: 0.512s,  250.00/s  LR: 1.000e-06  Data: 0.010 (0.010)\n"
        "Train: 0 [  99/100 (100%)]  Loss: 6.50 (6.75)  Time: 0.512s,  250.00/s  LR: 1.000e-06  Data: 0.010 (0.010)\n"
        "Train: 1 [   0/100 (  0%)]  Loss: 6.25 (6.25)  Time: 0.512s,  250.00/s  LR: 2.000e-06  Data: 0.010 (0.010)\n"
        "Train: 1 [  99/100 (100%)]  Loss: 6.00 (6.20)  Time: 0.512s,  250.00/s  LR: 2.000e-06  Data: 0.010 (0.010)\n",
        [0, 99, 100, 199],
        {"loss": [6.95, 6.5, 6.25, 6.0], "learning_rate": [1e-6, 1e-6, 2e-6, 2e-6]},
    ),
    "DeiT": (
        "deit.log",
        "Epoch: [0]  [  0/40]  eta: 0:20:00  lr: 0.000001  loss: 6.9375 (6.9375)  time: 0.5123  data: 0.1000  max mem: 5000\n"
        "Epoch: [0]  [ 20/40]  eta: 0:10:00  lr: 0.000001  loss: 6.5000 (6.7000)  time: 0.5123  data: 0.1000  max mem: 5000\n"
        "Epoch: [1]  [  0/40]  eta: 0:20:00  lr: 0.000002  loss: 6.2500 (6.2500)  time: 0.5123  data: 0.1000  max mem: 5000\n",
        [0, 20, 40],
        {"loss": [6.9375, 6.5, 6.25], "learning_rate": [1e-6, 1e-6, 2e-6]},
    ),
    "MMEngine": (
        "mm.log",
        "2023/01/01 10:00:00 - mmengine - INFO - Epoch(train)  [1][ 50/100]  lr: 1.0000e-03  eta: 1:00:00  time: 0.5  memory: 5000  loss: 2.5000\n"
        "2023/01/01 10:01:00 - mmengine - INFO - Epoch(train)  [1][100/100]  lr: 1.0000e-03  eta: 1:00:00  time: 0.5  memory: 5000  loss: 2.2500\n"
        "2023/01/01 10:02:00 - mmengine - INFO - Epoch(train)  [2][ 50/100]  lr: 1.0000e-03  eta: 1:00:00  time: 0.5  memory: 5000  loss: 2.0000\n",
        [50, 100, 150],
        {"loss": [2.5, 2.25, 2.0], "learning_rate": [1e-3] * 3},
    ),
    "OpenNMT": (
        "nmt.log",
        "[2020-01-01 10:00:00,000 INFO] Step 50/10000; acc:  10.50; ppl: 1000.50; xent: 6.91; lr: 0.00001; 5000/6000 tok/s;     30 sec\n"
        "[2020-01-01 10:00:30,000 INFO] Step 100/10000; acc:  12.50; ppl: 665.14; xent: 6.50; lr: 0.00002; 5000/6000 tok/s;     60 sec\n",
        [50, 100],
        {"loss": [6.91, 6.5], "accuracy": [0.105, 0.125], "learning_rate": [1e-5, 2e-5]},
    ),
    "Marian": (
        "marian.log",
        "[2020-01-01 10:00:00] Ep. 1 : Up. 1000 : Sen. 64,000 : Cost 7.12500000 : Time 30.10s : 12345.67 words/s : L.r. 1.0000e-04\n"
        "[2020-01-01 10:00:30] Ep. 1 : Up. 2000 : Sen. 128,000 : Cost 6.12500000 : Time 30.10s : 12345.67 words/s : L.r. 2.0000e-04\n",
        [1000, 2000],
        {"loss": [7.125, 6.125]},
    ),
    "Nanotron": (
        "nanotron.out",
        "[INFO|DP=0|PP=0|TP=0|ip-10-0-0-1]: iteration: 10 / 1000 | consumed_tokens: 5.24M | elapsed_time_per_iteration_ms: 1.23K | tokens_per_sec: 4.2K | global_batch_size: 512 | lm_loss: 10.5 | lr: 3e-05 | grad_norm: 12.5 | hd_total_memory_tb: 312G\n"
        "[INFO|DP=0|PP=0|TP=0|ip-10-0-0-1]: iteration: 20 / 1000 | consumed_tokens: 10.5M | elapsed_time_per_iteration_ms: 1.23K | tokens_per_sec: 4.2K | global_batch_size: 1.02K | lm_loss: 9.5 | lr: 6e-05 | grad_norm: 10.5 | hd_total_memory_tb: 312G\n",
        [10, 20],
        {"loss": [10.5, 9.5], "learning_rate": [3e-5, 6e-5], "grad_norm": [12.5, 10.5], "batch_size": [512, 1020]},
    ),
    "InternEvo": (
        "intern.log",
        "2023-07-07 12:26:58,293 INFO train.py:317 in record_metrics -- tflops=63.3,step=0,loss=11.75,tgs (tokens/gpu/second)=4095.41,lr=4.0e-07,loss_scale=65536.0,grad_norm={'0_default': 63.5},micro_num=4,num_consumed_tokens=131072\n"
        "2023-07-07 12:27:08,293 INFO train.py:317 in record_metrics -- tflops=63.3,step=1,loss=11.5,tgs (tokens/gpu/second)=4095.41,lr=6.0e-07,loss_scale=65536.0,grad_norm={'0_default': 60.25},micro_num=4,num_consumed_tokens=262144\n",
        [0, 1],
        {"loss": [11.75, 11.5], "learning_rate": [4e-7, 6e-7], "grad_norm": [63.5, 60.25]},
    ),
    "ModelScope's logging.jsonl": (
        "logging.jsonl",
        '{"loss": 2.5, "grad_norm": 1.5, "learning_rate": 1e-05, "token_acc": 0.5, "epoch": 0.1, "global_step/max_steps": "10/100", "percentage": "10.00%", "elapsed_time": "1m 2s"}\n'
        '{"loss": 2.25, "grad_norm": 1.25, "learning_rate": 2e-05, "token_acc": 0.55, "epoch": 0.2, "global_step/max_steps": "20/100", "percentage": "20.00%", "elapsed_time": "2m 2s"}\n',
        [10, 20],
        {"loss": [2.5, 2.25], "grad_norm": [1.5, 1.25], "learning_rate": [1e-5, 2e-5], "accuracy": [0.5, 0.55]},
    ),
    "Cerebras": (
        "run.log",
        "2023-01-01 10:00:00 INFO:   | Train Device=CSX, Step=50, Loss=9.50000, Rate=101.73 samples/sec, GlobalRate=101.73 samples/sec\n"
        "2023-01-01 10:01:00 INFO:   | Train Device=CSX, Step=100, Loss=8.25000, Rate=101.73 samples/sec, GlobalRate=101.73 samples/sec\n",
        [50, 100],
        {"loss": [9.5, 8.25]},
    ),
    "a tutorial": (
        "out.txt",
        "Epoch [1/2], Step [100/200], Loss: 2.2500\nEpoch [1/2], Step [200/200], Loss: 2.1250\nEpoch [2/2], Step [100/200], Loss: 2.0000\n",
        [100, 200, 300],
        {"loss": [2.25, 2.125, 2.0]},
    ),
    "TensorFlow": (
        "tf.log",
        "I0101 10:00:00.123456 140 estimator.py:20] INFO:tensorflow:loss = 2.5, step = 100 (0.512 sec)\nI0101 10:00:01.123456 140 estimator.py:20] INFO:tensorflow:loss = 2.25, step = 200 (0.512 sec)\n",
        [100, 200],
        {"loss": [2.5, 2.25]},
    ),
    "SpeechBrain": (
        "train_log.txt",
        "epoch: 1, lr: 1.00e-03 - train loss: 2.50 - valid loss: 2.12, valid WER: 34.12\nepoch: 2, lr: 5.00e-04 - train loss: 2.25 - valid loss: 2.00, valid WER: 30.12\n",
        [1, 2],
        {"loss": [2.5, 2.25], "learning_rate": [1e-3, 5e-4]},
    ),
    "lines by srun": (
        "slurm.out",
        "0: step 1 | loss 2.5\n1: step 1 | loss 2.75\n1: step 2 | loss 2.7\n0: step 2 | loss 2.25\n0: step 3 | loss 2.0\n",
        [1, 2, 3],
        {"loss": [2.5, 2.25, 2.0]},
    ),
    "the step first": ("a.log", "[100] loss: 2.5, lr 0.1\n[200] loss: 2.25, lr 0.2\n", [100, 200], {"loss": [2.5, 2.25], "learning_rate": [0.1, 0.2]}),
    "MLX": (
        "mlx.txt",
        "Starting training..., iters: 1000\nIter 1: Val loss 2.086, Val took 17.177s\n"
        "Iter 25: Train loss 1.500, Learning Rate 7.000e-05, It/sec 0.999, Tokens/sec 387.697, Trained Tokens 9699, Peak mem 8.104 GB\n"
        "Iter 50: Train loss 1.250, Learning Rate 7.000e-05, It/sec 0.942, Tokens/sec 369.778, Trained Tokens 19515, Peak mem 8.104 GB\n"
        "Iter 50: Saved adapter weights to checkpoints/50_adapters.npz.\n",
        [25, 50],
        {"loss": [1.5, 1.25], "learning_rate": [7e-5, 7e-5]},
    ),
    "a bar with warnings": (
        "minfm.log",
        "Training:  78%|###8  | 1556/2000 [6:15:28<1:55:17, 15.58s/step]2025-08-23 06:19:20,889 - trainers - WARNING - Step 1557: detected nan/inf/spiky gradient (norm=2.25); skipping optimizer step.\n"
        "2025-08-23 06:19:20,890 - trainers - INFO - Step   1557 | Loss: 0.5000 | LR: 3.00e-04 | GradNorm: 2.25 | TPS: 16.88K | Data: 0.007s\n"
        "2025-08-23 06:20:07,600 - trainers - INFO - Step   1558 | Loss: 0.2500 | LR: 3.00e-04 | GradNorm: 1.50 | TPS: 16.88K | Data: 0.007s\n",
        [1557, 1558],
        {"loss": [0.5, 0.25], "learning_rate": [3e-4, 3e-4], "grad_norm": [2.25, 1.5]},
    ),
    "BigDL": (
        "bigdl.log",
        "2018-04-14 00:58:52 INFO  DistriOptimizer$:392 - [Epoch 149 390144/1281167][Iteration 61991][Wall Clock 90297.102s] Trained 3072 records in 1.402170578 seconds. Throughput is 2190.889 records/second. Loss is 2.5. Current learning rate is 0.125. Current momentum is 0.9.\n"
        "2018-04-14 00:58:53 INFO  DistriOptimizer$:392 - [Epoch 149 393216/1281167][Iteration 61992][Wall Clock 90298.517s] Trained 3072 records in 1.415734803 seconds. Throughput is 2171.430 records/second. Loss is NaN. Current learning rate is 0.25. Current momentum is 0.9.\n",
        [61991, 61992],
        {"loss": [2.5, NAN], "learning_rate": [0.125, 0.25]},
    ),
    "char-rnn": (
        "rnn.txt",
        "518/9500 (epoch 2.726), train_loss = 1.90625000, grad/param norm = 7.3484e-02, time/batch = 0.1694s\t\n"
        "519/9500 (epoch 2.732), train_loss = 1.87500000, grad/param norm = 7.2377e-02, time/batch = 0.1703s\t\n",
        [518, 519],
        {"loss": [1.90625, 1.875]},
    ),
    "LLaMA2-Accessory": (
        "acc.log",
        "[03:24:35.668475] Epoch: [0]  [1490/1500]  lr: 0.000026  closs: 1.0625 (1.1312)  grad_norm: 0.5000 (1.1826)  time: 4.5827  data: 0.0002  max mem: 51710\n"
        "[03:29:13.729627] Epoch: [1]  [0/1500]  lr: 0.000025  closs: 1.0000 (1.0072)  grad_norm: 0.2500 (0.2500)  time: 5.7865  data: 1.2589  max mem: 51710\n",
        [1490, 1500],
        {"loss": [1.0625, 1.0], "grad_norm": [0.5, 0.25], "learning_rate": [2.6e-5, 2.5e-5]},
    ),
    "Swin": (
        "swin.txt",
        "[2024-07-27 03:40:20 tiny] (main.py 295): INFO Train: [30/300][2800/2850]\teta 0:18:22 lr 0.000872\t wd 0.0500\ttime 0.4252 (0.4860)\tloss 2.1250 (1.9664)\tgrad_norm 2.7500 (2.6131)\tloss_scale 32768.0000 (32768.0000)\tmem 16138MB\n"
        "[2024-07-27 03:40:24 tiny] (main.py 295): INFO Train: [31/300][0/2850]\teta 0:18:16 lr 0.000872\t wd 0.0500\ttime 0.4265 (0.4852)\tloss 2.0625 (1.9666)\tgrad_norm 2.1250 (2.6195)\tloss_scale 32768.0000 (32768.0000)\tmem 16138MB\n",
        [2800, 2850],
        {"loss": [2.125, 2.0625], "grad_norm": [2.75, 2.125], "learning_rate": [0.000872] * 2},
    ),
    "a fork of nanoGPT": (
        "fork.log",
        "step 0: train loss 11.6275, val loss 11.6275\n0 | loss 11.6250 | lr 3.000000e-04 | 104573.61ms\n10 | loss 9.3750 | lr 3.000000e-04 | 13597.70ms\n20 | loss 7.5000 | lr 3.000000e-04 | 13614.83ms\n",
        [0, 10, 20],
        {"loss": [11.625, 9.375, 7.5], "learning_rate": [3e-4] * 3},
    ),
    "epochs alone": (
        "epochs.txt",
        "epoch: 3449 loss: 0.2075\nepoch: 3450 loss: 0.2106\nepoch: 3451 loss: nan\n",
        [3449, 3450, 3451],
        {"loss": [0.2075, 0.2106, NAN]},
    ),
    "MNIST example of PyTorch": (
        "mnist.txt",
        "Train Epoch: 1 [0/1280 (0%)]\tLoss: 2.312500\nTrain Epoch: 1 [640/1280 (50%)]\tLoss: 1.250000\n\nTest set: Average loss: 0.0513, Accuracy: 9830/10000 (98%)\n\nTrain Epoch: 2 [0/1280 (0%)]\tLoss: 0.750000\nTrain Epoch: 2 [640/1280 (50%)]\tLoss: 0.500000\n",
        [0, 640, 1280, 1920],
        {"loss": [2.3125, 1.25, 0.75, 0.5]},
    ),
    "what a container printed": (
        "pod.jsonl",
        '{"log":"step: 1 loss: 2.5 lr: 0.1\\n","stream":"stdout","time":"2026-01-01T10:00:00.1Z"}\n{"log":"step: 2 loss: 2.25 lr: 0.2\\n","stream":"stdout","time":"2026-01-01T10:00:01.1Z"}\n',
        [1, 2],
        {"loss": [2.5, 2.25], "learning_rate": [0.1, 0.2]},
    ),
    "two counters without names": (
        "loop.txt",
        "1/9 0/100 loss=2.5\n1/9 50/100 loss=2.25\n2/9 0/100 loss=2.0\n2/9 50/100 loss=1.75\n",
        [0, 50, 100, 150],
        {"loss": [2.5, 2.25, 2.0, 1.75]},
    ),
}  # fmt: skip
