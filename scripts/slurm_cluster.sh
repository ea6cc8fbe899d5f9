#!/usr/bin/env bash
# A Slurm cluster of two nodes on this host, which listens on loopback only: to try what `jaxtrain submit slurm` writes.
#
#   apt-get install -y --no-install-recommends slurm-wlm
#   scripts/slurm_cluster.sh start /tmp/slurm     # prints the line that makes its commands use it
#   export SLURM_CONF=/tmp/slurm/slurm.conf
#   jaxtrain submit slurm quickstart --nodes 2 --emulate 2 --time 10 --run
#   scripts/slurm_cluster.sh status /tmp/slurm
#   scripts/slurm_cluster.sh restart-node /tmp/slurm zzz2   # after its slurmd was killed
#   scripts/slurm_cluster.sh stop /tmp/slurm      # ends jobs and daemons, and removes the files
#
# Nodes: this host's name and zzz2, with 32 CPUs and 2 GPUs that are plain files. Nobody proves who he is: jobs of other
# users of this host would be taken too. Requeued jobs wait for 2 minutes in Slurm; `scontrol update JobId=N StartTime=now`,
# some seconds after the job ended, shortens that.
set -euo pipefail

usage() { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 2 ] || usage
# Slurm's daemons are in /usr/sbin, which is not on every path.
export PATH=$PATH:/usr/sbin
what=$1 folder=$(realpath -m -- "$2")
export SLURM_CONF=$folder/slurm.conf
first=$(hostname -s) second=zzz2

need() { command -v "$1" >/dev/null || { echo "slurm_cluster: no $1 on PATH; apt-get install slurm-wlm" >&2; exit 1; }; }

# Ports from a random one on, all of which nobody answers on.
free_ports() {
  local base=$((20000 + RANDOM % 8000)) port
  for port in $base $((base + 1)) $((base + 2)); do
    if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then free_ports; return; fi
  done
  echo "$base"
}

write_files() {
  local port node version plugin=cgroup/v1
  port=$(free_ports)
  version=$(slurmd -V | grep -oE '[0-9]+' | head -n 1)
  [ ! -e /sys/fs/cgroup/cgroup.controllers ] || plugin=cgroup/v2
  # Older ones end at a plugin of this name.
  [ "$version" -lt 23 ] || plugin=disabled
  mkdir -p "$folder/state" "$folder/spool/$first" "$folder/spool/$second" "$folder/log"
  echo "CgroupPlugin=$plugin" >"$folder/cgroup.conf"
  touch "$folder/gpu0" "$folder/gpu1"
  node="Boards=1 SocketsPerBoard=1 CoresPerSocket=32 ThreadsPerCore=1 CPUs=32 RealMemory=1000 Gres=gpu:2 State=UNKNOWN"
  echo "Name=gpu File=$folder/gpu[0-1]" >"$folder/gres.conf"
  cat >"$folder/slurm.conf" <<CONF
ClusterName=jaxtrain
SlurmctldHost=$first(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=5
${SLURM_CLUSTER_LINES:-}
NodeName=$first NodeHostname=$first NodeAddr=127.0.0.1 Port=$((port + 1)) $node
NodeName=$second NodeHostname=$first NodeAddr=127.0.0.1 Port=$((port + 2)) $node
PartitionName=main Nodes=$first,$second Default=YES MaxTime=60 State=UP
PartitionName=one Nodes=$first MaxTime=10 State=UP
CONF
}

# The daemons of this cluster, also those that no pid file names because they were left by a killed one.
daemons() {
  local place
  for place in /proc/[0-9]*; do
    case $(cat "$place/comm" 2>/dev/null || true) in
      # A process that has ended has no environment, until its parent asks for its exit code.
      slurmctld | slurmd | slurmstepd)
        ! { tr '\0' '\n' <"$place/environ"; } 2>/dev/null | grep -qxF "SLURM_CONF=$SLURM_CONF" || echo "${place#/proc/}" ;;
    esac
  done
}

case $what in
  start)
    need slurmctld; need slurmd; need sinfo
    [ ! -e "$SLURM_CONF" ] || { echo "slurm_cluster: $folder holds a cluster already; stop it first" >&2; exit 1; }
    write_files
    slurmctld -c
    slurmd -N "$first"
    slurmd -N "$second"
    for _ in $(seq 300); do
      [ "$(sinfo --noheader --Node --partition=main --states=idle 2>/dev/null | wc -l)" = 2 ] && break
      sleep 0.1
    done
    sinfo --Node --partition=main
    echo "export SLURM_CONF=$SLURM_CONF"
    ;;
  restart-node)
    slurmd -N "${3:?the name of a node}"
    ;;
  status)
    sinfo --Node
    squeue
    ;;
  stop)
    [ -e "$SLURM_CONF" ] || { echo "slurm_cluster: no cluster in $folder" >&2; exit 1; }
    scancel --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 100); do [ -z "$(squeue --noheader 2>/dev/null)" ] && break; sleep 0.1; done
    ids=$(daemons)
    # Nodes end before the controller, to which they say so.
    [ -z "$ids" ] || kill $ids 2>/dev/null || true
    for _ in $(seq 100); do [ -z "$(daemons)" ] && break; sleep 0.1; done
    ids=$(daemons)
    [ -z "$ids" ] || kill -KILL $ids 2>/dev/null || true
    rm -rf -- "$folder"/{state,spool,log} "$folder"/{slurm,gres,cgroup}.conf "$folder"/gpu[01] "$folder"/slurm*.pid
    rmdir -- "$folder" 2>/dev/null || true
    ;;
  *) usage ;;
esac
