"""Speed and accuracy of ascend_grad, measured: cases, rivals, results, and the tables and the chart made from them."""
