"""What an iteration is: `live` predicts it in the training process, `rule` finds it in the records afterwards."""
