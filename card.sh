#!/bin/bash
began=$(date +%s); REPO=$PWD; L=/tmp/logs; mkdir -p $L
export PYTHONUNBUFFERED=1 PYTHONPATH=$REPO PY=python3 PYALLOC_COMMIT=$1 PYTHONWARNINGS=ignore
t() { echo $(( $(date +%s) - began )); }
job() { local b=$(t); timeout -k 3 "$2" bash -c "$3" > "$L/$1.log" 2>&1; local rc=$?; echo "$1 rc=$rc from $b to $(t)" | tee -a $L/summary; }
LIB=$(ldconfig -p | grep -m1 'libcuda.so.1' | sed 's/.*=> //')
job probe 30 "gcc -O2 card_probe.c -o /tmp/probe -I/usr/local/cuda/include $LIB -lpthread && /tmp/probe" 
job training 110 "python3 -m benchmarks.training --device cuda --only gpt_fixed gpt_varying seq2seq resnet50 unet vit moe detector --allocators native expandable pyalloc --jobs 8 --turns --json 2> $L/training.err"
tar czf $OUT/logs.tgz -C /tmp logs
cat $L/summary; cat $L/probe.log; tail -5 $L/training.err; python3 - <<'X'
import json
for l in open('/tmp/logs/training.log'):
    r=json.loads(l); print(r['program'],r['allocator'],r.get('median_ms'),r.get('seconds'),r.get('process_s'),r.get('calls'),round(r['peak_bytes']/r['live_bytes'],4) if r.get('live_bytes') else r['failed'], r.get('retries'), r.get('n_allocations'))
X
