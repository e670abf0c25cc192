from memjax.shard import ring as ring
