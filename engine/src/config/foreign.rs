//! Options of other launchers, and what does the same here.

/// Names without dashes, and the sentence that names ours.
const OPTIONS: &[(&[&str], &str)] = &[
    (
        &["n", "np", "nproc-per-node", "nproc_per_node", "num-proc", "c"],
        "did you mean --local? On several machines it is --hosts host1:4,host2:4",
    ),
    (&["nnodes", "nodes", "num-workers"], "did you mean --hosts host1:4,host2:4?"),
    (
        &["WH", "worker-hostfile", "machinefile", "f"],
        "did you mean --hostfile? Its lines are 'host slots=4' or 'host:4', where 4 is the number \
         of ranks and not a port of ssh; that is --ssh-port",
    ),
    (
        &["SH", "server-hostfile", "num-servers"],
        "did you mean --servers cpu1:8,cpu2:8? The numbers are cores and not ports of ssh; those \
         are --ssh-port",
    ),
    (
        &["host-discovery-script"],
        "did you mean --host-discovery? It wants --elastic redo or shrink, too",
    ),
    (&["min-np", "min-num-proc"], "did you mean --min-workers?"),
    (&["max-np", "max-num-proc"], "did you mean --max-workers?"),
    (&["slots-per-host"], "did you mean --slots?"),
    (&["blacklist-cooldown-range"], "did you mean --restart-delay and --restart-delay-max?"),
    (&["host"], "did you mean --hosts?"),
    (&["username", "user"], "did you mean --ssh-user? user@host in --hosts says the same"),
    (&["scheduler-ip"], "did you mean --scheduler-host?"),
    (
        &["scheduler-port"],
        "with --hosts the scheduler takes a port that is free; without, it is --root-port",
    ),
    (&["scheduler-ssh-port", "p"], "did you mean --ssh-port?"),
    (
        &["ssh-identity-file", "i"],
        "did you mean --ssh-command 'ssh -i FILE'? IdentityFile in ssh's own configuration does \
         the same",
    ),
    (&["network-interface", "network-interfaces", "nics"], "did you mean --interface?"),
    (&["wdir", "wd", "workdir"], "did you mean --chdir?"),
    (
        &["log-dir", "log_dir", "output-filename"],
        "all output comes here, with the rank before each line; redirect it: \
         bpslaunch ... >out.log 2>err.log",
    ),
];

/// What to use in place of an option of another launcher.
pub(super) fn option(name: &str) -> Option<&'static str> {
    let found = OPTIONS.iter().find(|(names, _)| names.contains(&name));
    found.map(|(_, ours)| *ours)
}
