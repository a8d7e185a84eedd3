//! Who may use whom. `docs/architecture.md` explains the table; this is the table.

use super::source::{Source, Violation, first_names, report, sources};

/// Modules, and which others each may use.
type Layers = &'static [(&'static str, &'static [&'static str])];

/// Modules of the engine, and which others each may use. Bottom first.
const ENGINE: Layers = &[
    ("base", &[]),
    ("limits", &[]),
    ("config", &["base", "limits"]),
    ("reduce", &["base", "limits"]),
    ("sync", &[]),
    ("ring", &["base", "limits", "sync"]),
    ("team", &["sync"]),
    ("waits", &[]),
    ("topo", &["base", "limits"]),
    ("wire", &["base", "limits"]),
    ("trace", &["base", "limits", "config", "ring", "waits", "wire"]),
    ("encode", &["base", "limits", "reduce"]),
    ("optimize", &["reduce", "encode"]),
    ("keys", &["base", "limits"]),
    ("mem", &["base", "limits", "team", "topo", "trace"]),
    ("proto", &["base", "limits", "encode", "optimize", "wire", "keys"]),
    ("sched", &["base", "limits"]),
    ("transport", &["base", "limits", "mem", "ring", "sync", "team", "wire", "config"]),
    ("control", &["base", "limits", "config", "proto", "trace", "transport", "waits"]),
    ("host", &["base", "limits", "config"]),
    ("harness", &["base", "limits", "config", "ring", "topo", "trace", "waits"]),
    ("lane", &["base", "limits", "config", "team", "wire", "mem", "proto", "transport"]),
    ("metrics", &["base", "limits", "config", "host", "proto", "trace", "transport", "waits"]),
];

/// Modules of the worker, likewise.
const WORKER: Layers = &[
    ("terminated", &[]),
    ("cuda", &[]),
    ("base", &["cuda"]),
    ("host", &[]),
    ("rounds", &["base", "cuda"]),
    ("nic", &["base", "host", "rounds"]),
    ("gpu", &["base", "cuda", "host", "rounds"]),
    ("job", &["base", "cuda", "host", "nic", "rounds", "terminated"]),
    ("api", &["base", "cuda", "gpu", "host", "job", "rounds"]),
];

/// Modules of the launcher, likewise.
const LAUNCH: Layers = &[
    ("error", &[]),
    ("output", &[]),
    ("frames", &[]),
    ("hosts", &["error"]),
    ("signals", &["error"]),
    ("port", &["error"]),
    ("binding", &["error"]),
    ("plan", &["binding", "error", "port"]),
    ("local", &["binding", "error", "plan", "port"]),
    ("by_variables", &["binding", "error", "local", "plan"]),
    ("layout", &["error", "hosts", "local"]),
    ("meeting", &["error", "frames", "hosts", "layout"]),
    ("share", &["binding", "error", "frames", "local", "plan"]),
    ("ssh", &["error", "hosts", "layout"]),
    ("child", &["plan"]),
    ("crew", &["hosts", "signals"]),
    ("streams", &["signals"]),
    ("screen", &["output", "streams"]),
    (
        "children",
        &["child", "crew", "error", "hosts", "output", "plan", "screen", "signals", "streams"],
    ),
    ("discovery", &["child", "error", "hosts", "output", "signals"]),
    ("fleet", &["crew", "discovery", "hosts", "output", "signals"]),
    ("supervise", &["children", "crew", "error", "fleet", "output", "plan", "signals"]),
    (
        "remote",
        &[
            "child", "crew", "error", "frames", "hosts", "layout", "output", "plan", "screen",
            "signals", "ssh", "streams",
        ],
    ),
    (
        "agent",
        &[
            "binding", "child", "children", "crew", "error", "frames", "output", "plan", "port",
            "share", "signals", "streams",
        ],
    ),
    (
        "several",
        &[
            "discovery",
            "error",
            "fleet",
            "frames",
            "hosts",
            "layout",
            "local",
            "meeting",
            "output",
            "plan",
            "remote",
            "signals",
            "ssh",
            "supervise",
        ],
    ),
];

/// Modules of the server and the scheduler, likewise.
const SERVER: Layers = &[
    ("entry", &[]),
    ("error", &[]),
    ("scheduler", &[]),
    ("shown", &[]),
    ("timeline", &[]),
    ("top", &[]),
    ("shard", &["entry"]),
    ("signals", &["error"]),
    ("agent", &["entry", "shard"]),
    ("cores", &["error", "shard"]),
    ("listen", &["cores", "error", "shard"]),
    ("run", &["agent", "cores", "error", "listen", "shard", "shown", "signals", "timeline"]),
];

/// Modules of the Python extension, likewise.
const PYTHON: Layers = &[
    ("cli", &[]),
    ("error", &[]),
    ("fork", &["error"]),
    ("waiting", &["error"]),
    ("handle", &["error", "fork", "waiting"]),
    ("context", &["error", "fork", "handle", "waiting"]),
    ("dlpack", &[]),
    ("plain", &["dlpack"]),
    ("gradients", &["error", "fork", "plain", "waiting"]),
    ("completions", &["gradients", "waiting"]),
    ("tensor", &["context", "error", "gradients", "handle", "plain", "waiting"]),
    ("declared", &["error"]),
    ("uneven", &["context", "declared", "error", "waiting"]),
    ("completer", &[]),
    ("mxnet", &["context", "error"]),
    ("xla", &["completer", "context", "declared", "error", "uneven"]),
    ("tf", &["completer", "context", "declared", "error", "uneven"]),
];

/// The crates whose modules are in layers.
const LAYERED: &[(&str, Layers)] = &[
    ("engine", ENGINE),
    ("server", SERVER),
    ("worker", WORKER),
    ("worker/launch", LAUNCH),
    ("python", PYTHON),
];

/// Crates by their folders, and which others of ours each may use.
const CRATES: &[(&str, &[&str])] = &[
    ("engine", &[]),
    ("server", &["bps_engine"]),
    ("worker", &["bps_engine"]),
    ("worker/launch", &["bps_engine"]),
    ("python", &["bps_engine", "bps_launch", "bps_server", "bps_worker"]),
    ("perf", &["bps_engine", "bps_server", "bps_worker", "bps_tests"]),
    ("tests", &["bps_engine", "bps_server", "bps_worker", "bps_tests"]),
];

/// Modules that are told the time and given their bytes, and what they must not name.
const PURE: &[&str] = &[
    "engine/src/base",
    "engine/src/limits",
    "engine/src/reduce",
    "engine/src/encode",
    "engine/src/optimize",
    "engine/src/wire",
    "engine/src/keys",
    "engine/src/proto",
    "engine/src/sched",
    "server/src/agent",
    "server/src/entry",
    "worker/src/host",
    "worker/src/job/agent",
    "worker/src/rounds/plan",
    "worker/src/rounds/table",
];
const IMPURE: &[&str] = &[
    "Instant::now",
    "SystemTime",
    "std::thread",
    "std::fs",
    "std::os",
    "std::process::Command",
    "rustix",
    "libc",
    "io_uring",
    "socket2",
];

/// Files that may read the environment: each variable is read once, at start.
const ENVIRONMENT: &[&str] = &["engine/src/config", "worker/launch/src"];

/// The folder of a file's crate: the longest one of `CRATES` that holds it, or the first folder.
fn crate_of(path: &str) -> &str {
    let holds = |folder: &&str| path.strip_prefix(*folder).is_some_and(|it| it.starts_with('/'));
    let folders = CRATES.iter().map(|(folder, _)| *folder).filter(holds);
    let first = path.split('/').next().unwrap_or_default();
    folders.max_by_key(|folder| folder.len()).unwrap_or(first)
}

/// What Rust code calls the crate in this folder: `bps_launch` for `worker/launch`.
fn crate_name(folder: &str) -> String {
    format!("bps_{}", folder.rsplit('/').next().unwrap_or(folder))
}

/// Whether a file is this module (`engine/src/wire`) or below it.
fn is_in(path: &str, module: &str) -> bool {
    path.strip_prefix(module).is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
}

/// The module that a file of this crate's library is or is below; none if it is no such file, or
/// the library's root.
fn module_of(source: &Source, name: &str) -> Option<String> {
    let (root, names) = source.module()?;
    names.into_iter().next().filter(|_| root.strip_suffix("/src") == Some(name))
}

/// The modules of its own crate that a file names outside its tests.
fn used_modules(source: &Source) -> Vec<(usize, String)> {
    let paths = source.own_paths().into_iter().filter(|(line, _)| !source.test[*line]);
    let first = |(line, path): (usize, Vec<String>)| Some((line, path.into_iter().next()?));
    let mut used: Vec<(usize, String)> = paths.filter_map(first).collect();
    used.dedup();
    used
}

#[test]
fn modules_use_only_the_layers_below_them() {
    let mut violations = Vec::new();
    for source in sources() {
        let name = crate_of(&source.path);
        let Some((_, table)) = LAYERED.iter().find(|(layered, _)| *layered == name) else {
            continue;
        };
        let Some(module) = module_of(&source, name) else { continue };
        let Some((_, allowed)) = table.iter().find(|(known, _)| *known == module) else {
            let message =
                format!("module `{module}` is in no layer: add it to the table of `{name}`");
            violations.push(source.violation(0, message));
            continue;
        };
        for (line, used) in used_modules(&source) {
            if used == module || allowed.contains(&used.as_str()) {
                continue;
            }
            let known = table.iter().any(|(module, _)| *module == used);
            let message = if known {
                format!(
                    "layers: `{module}` may use {allowed:?} and not `{used}`: \
                     move the code up, or pass in what it needs"
                )
            } else {
                format!("layers: `{used}` is no module of {name}: name what you use by its module")
            };
            violations.push(source.violation(line, message));
        }
    }
    report(&violations);
}

#[test]
fn crates_use_only_the_crates_below_them() {
    let mut violations = Vec::new();
    for source in sources() {
        let name = crate_of(&source.path);
        let Some((_, allowed)) = CRATES.iter().find(|(known, _)| *known == name) else { continue };
        for (folder, _) in CRATES {
            let other = crate_name(folder);
            // A program under src/bin names its own library so.
            if allowed.contains(&other.as_str()) || folder == &name {
                continue;
            }
            for (line, _) in source.places(&other) {
                let message = format!("crates: `{name}` may use {allowed:?} and not `{other}`");
                violations.push(source.violation(line, message));
            }
        }
    }
    report(&violations);
}

/// What `std::net::` is followed by must be an address: those are values, not sockets.
fn check_sockets(source: &Source, violations: &mut Vec<Violation>) {
    for (line, column) in source.places("std::net::") {
        for name in first_names(&source.rest(line, column)) {
            let address = name.contains("Addr") || name.contains("AddrParse");
            if !address && !source.test[line] {
                let message =
                    format!("purity: `std::net::{name}` is a socket; only addresses here");
                violations.push(source.violation(line, message));
            }
        }
    }
}

#[test]
fn protocol_and_arithmetic_know_no_clock_socket_or_thread() {
    let mut violations = Vec::new();
    for source in sources() {
        let Some(module) = PURE.iter().find(|module| is_in(&source.path, module)) else { continue };
        check_sockets(&source, &mut violations);
        for impure in IMPURE {
            for (line, _) in source.places(impure) {
                if !source.test[line] {
                    let message = format!(
                        "purity: `{module}` must not name `{impure}`: time, bytes and files are \
                         passed in by the caller"
                    );
                    violations.push(source.violation(line, message));
                }
            }
        }
    }
    report(&violations);
}

#[test]
fn environment_is_read_in_one_place() {
    let mut violations = Vec::new();
    for source in sources() {
        if ENVIRONMENT.iter().any(|allowed| source.path.starts_with(allowed)) {
            continue;
        }
        for name in ["env::var", "env::vars", "env::var_os", "env::vars_os", "env::set_var"] {
            for (line, _) in source.places(name) {
                if !source.test[line] {
                    let message = format!(
                        "environment: `{name}` outside {ENVIRONMENT:?}: make it a row of the \
                         table in engine/src/config"
                    );
                    violations.push(source.violation(line, message));
                }
            }
        }
    }
    report(&violations);
}

#[test]
fn the_tables_name_modules_that_exist_and_go_downward() {
    let sources = sources();
    for (name, table) in LAYERED {
        let mut below: Vec<&str> = Vec::new();
        for (module, allowed) in *table {
            let exists = sources.iter().any(|s| {
                crate_of(&s.path) == *name && module_of(s, name).as_deref() == Some(module)
            });
            assert!(
                exists,
                "the table of `{name}` names `{module}`, which is not there: remove it"
            );
            below.push(module);
            for used in *allowed {
                let known = table.iter().any(|(module, _)| module == used);
                assert!(known, "`{module}` may use `{used}`, which is no module of the table");
                assert!(below.contains(used), "`{module}` is below `{used}`, and may not use it");
            }
        }
    }
}

#[test]
fn a_breach_is_found() {
    let text =
        "//! Wire.\nuse crate::{base::Key, transport::Waker};\nconst A: u8 = super::lane::X;\n";
    let source = Source::new("engine/src/wire.rs".into(), text);
    let names: Vec<String> = used_modules(&source).into_iter().map(|(_, name)| name).collect();
    assert_eq!(names, ["base", "transport", "lane"]);
    let crates = ["worker/launch/src/plan.rs", "worker/src/api.rs", "tests/run.rs"].map(crate_of);
    assert_eq!(crates, ["worker/launch", "worker", "tests"]);
    assert_eq!(crate_name("worker/launch"), "bps_launch");
    assert_eq!(module_of(&source, "engine").as_deref(), Some("wire"));
    let mut violations = Vec::new();
    let socket = "//! Proto.\nuse std::net::{SocketAddr, TcpStream};\n";
    check_sockets(&Source::new("engine/src/proto/x.rs".into(), socket), &mut violations);
    assert_eq!(violations.len(), 1);
}
