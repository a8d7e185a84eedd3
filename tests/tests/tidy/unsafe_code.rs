//! Where `unsafe` may stand, and that each place says why it is sound.

use super::source::{Source, report, sources};

/// Modules (files and folders) that may hold unsafe code: they touch memory that others own, or
/// call the kernel where no crate does.
const ALLOWED: &[&str] = &[
    "engine/src/encode/elements",
    "engine/src/encode/wide",
    "engine/src/host",
    "engine/src/lane",
    "engine/src/mem/arena",
    "engine/src/mem/cache",
    "engine/src/mem/lent",
    "engine/src/reduce/mod",
    "engine/src/reduce/avx2",
    "engine/src/reduce/avx512",
    "engine/src/reduce/blocks",
    "engine/src/reduce/neon",
    "engine/src/reduce/merge",
    "engine/src/reduce/scalar",
    "engine/src/reduce/slices",
    "engine/src/ring/cursor",
    "engine/src/team",
    "engine/src/topo/claim",
    "engine/src/topo/pin",
    "engine/src/transport/mod",
    "engine/src/transport/rdma",
    "engine/src/transport/shm",
    "engine/src/transport/sim/end",
    "engine/src/transport/tcp",
    "perf/src/cmd/codecs/gpu",
    "perf/src/cmd/idle",
    "perf/src/cmd/lane",
    "perf/src/cmd/latency",
    "perf/src/cmd/pushpull",
    "perf/src/probe/driver",
    "perf/src/probe/helpers",
    "perf/src/probe/memory",
    "perf/src/probe/multishot",
    "perf/src/probe/registered",
    "perf/src/probe/ring",
    "perf/src/probe/stores",
    "perf/src/probe/zerocopy",
    "perf/src/stage/namespace",
    "perf/src/stage/overtake",
    "perf/src/stage/rank",
    "python/src/dlpack",
    "python/src/fork",
    "python/src/mxnet",
    "python/src/tensor",
    "python/src/tf",
    "python/src/xla",
    "server/src/entry",
    "server/src/shard",
    // An allocator that counts.
    "server/tests/memory",
    "worker/launch/src/child",
    "worker/src/api/on_gpu",
    "worker/src/api/open_gpu",
    "worker/src/api/worker",
    "worker/src/base/task",
    "worker/src/cuda",
    "worker/src/gpu/assemble",
    "worker/src/gpu/bounce",
    "worker/src/gpu/buffers",
    "worker/src/gpu/direct",
    "worker/src/gpu/pipeline/copies",
    "worker/src/gpu/pipeline/host",
    "worker/src/gpu/pipeline/keeping",
    "worker/src/gpu/pipeline/staged",
    "worker/src/gpu/slots",
    "worker/src/gpu/staging",
    "worker/src/nic/arriving",
    "worker/src/nic/circle",
    "worker/src/nic/coding",
    "worker/src/nic/granted",
    "worker/src/nic/keeping",
    "worker/src/nic/sending",
    "worker/src/nic/staged",
    "worker/src/rounds/memory",
];

/// What a module says that holds no unsafe code: then the compiler refuses any in it and below it.
const FORBIDDEN: &str = "#![forbid(unsafe_code)]";

/// Words that a safety note may not rest on: they name no invariant.
const EMPTY: &[&str] = &["values are valid", "trust me", "obviously", "as above"];

fn is_allowed(path: &str) -> bool {
    // Tests make what they hand to unsafe functions themselves.
    path.starts_with("tests/")
        || path.contains("/tests/")
        || ALLOWED.iter().any(|allowed| {
            path.strip_prefix(allowed).is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
        })
}

/// Whether a module that may hold unsafe code lies below this one, which then cannot forbid it.
fn holds_allowed(path: &str) -> bool {
    let folder = path.strip_suffix(".rs").unwrap_or(path);
    let folder = ["/mod", "/lib", "/main"]
        .iter()
        .find_map(|name| folder.strip_suffix(name))
        .unwrap_or(folder);
    let below = |allowed: &&str| allowed.strip_prefix(folder).is_some_and(|it| it.starts_with('/'));
    ALLOWED.iter().any(below)
}

/// The files whose attributes hold for a module too: its own, and those of the modules around it.
fn around(path: &str) -> Vec<String> {
    let mut files = vec![path.to_owned()];
    let mut folder = path;
    while let Some((parent, _)) = folder.rsplit_once('/') {
        files.extend(["mod.rs", "lib.rs", "main.rs"].map(|name| format!("{parent}/{name}")));
        files.push(format!("{parent}.rs"));
        folder = parent;
    }
    files
}

/// The comments that belong to a line: on it, or above it within the same statement.
fn note_above(source: &Source, line: usize) -> String {
    let mut notes = vec![source.comment[line].trim()];
    for above in (0..line).rev().take(24) {
        let (code, comment) = (source.code[above].trim(), source.comment[above].trim());
        if code.ends_with([';', '{', '}']) || code.is_empty() && comment.is_empty() {
            break;
        }
        notes.push(comment);
    }
    notes.reverse();
    notes.join(" ")
}

#[test]
fn unsafe_stands_only_where_it_must() {
    let mut violations = Vec::new();
    for source in sources() {
        if is_allowed(&source.path) {
            continue;
        }
        for (line, _) in source.places("unsafe") {
            let message = "unsafe: this module is not listed in tests/tests/tidy/unsafe_code.rs; \
                           build on those that are";
            violations.push(source.violation(line, message));
        }
    }
    report(&violations);
}

#[test]
fn modules_without_unsafe_code_forbid_it() {
    let sources = sources();
    let forbids: Vec<&str> = sources
        .iter()
        .filter(|source| source.code.iter().any(|line| line.trim() == FORBIDDEN))
        .map(|source| source.path.as_str())
        .collect();
    let mut violations = Vec::new();
    for source in &sources {
        let is_whole_test = source.test.iter().all(|test| *test);
        let covered = around(&source.path).iter().any(|file| forbids.contains(&file.as_str()));
        if !covered && !is_allowed(&source.path) && !is_whole_test && !holds_allowed(&source.path) {
            let message =
                format!("unsafe: write `{FORBIDDEN}` here or in the module around it: it has none");
            violations.push(source.violation(0, message));
        }
    }
    report(&violations);
    for allowed in ALLOWED {
        let used = sources
            .iter()
            .any(|source| source.path.starts_with(allowed) && !source.places("unsafe").is_empty());
        assert!(used, "ALLOWED: {allowed} has no unsafe code any more: remove it, and forbid it");
    }
}

#[test]
fn each_unsafe_names_its_invariant() {
    let mut violations = Vec::new();
    for source in sources() {
        for (line, column) in source.places("unsafe") {
            let rest = source.rest(line, column);
            let rest = rest.trim_start();
            let note = note_above(&source, line);
            let problem = if rest.starts_with("fn") || rest.starts_with("extern") {
                let documented = note.contains("# Safety") || note.contains("SAFETY:");
                let is_pointer = rest.starts_with("fn(") || rest.starts_with("extern \"\" fn(");
                (!documented && !is_pointer)
                    .then_some("an unsafe function says `# Safety` and what its caller keeps")
            } else if rest.starts_with('{') || rest.starts_with("impl") {
                let empty = EMPTY.iter().any(|words| note.to_lowercase().contains(words));
                let said = note.split("SAFETY:").nth(1).map_or(0, |note| note.split(' ').count());
                (said < 4 || empty).then_some(
                    "write `// SAFETY:` above it: which invariant makes it sound, and who keeps it",
                )
            } else {
                None
            };
            if let Some(problem) = problem {
                violations.push(source.violation(line, format!("unsafe: {problem}")));
            }
        }
    }
    report(&violations);
}
