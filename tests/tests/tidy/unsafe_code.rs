//! Where `unsafe` may stand, and that each place says why it is sound.

use super::source::{Source, report, sources};

/// Modules (files and folders) that may hold unsafe code: they touch memory that others own, or
/// call the kernel where no crate does.
const ALLOWED: &[&str] = &[
    "engine/src/host",
    "engine/src/mem",
    "engine/src/reduce",
    "engine/src/ring",
    "engine/src/transport",
    "engine/src/topo/claim",
    "engine/src/topo/pin",
    "worker/launch/src/child",
    "perf/src",
    "python/src",
    "server/src/entry",
    "server/src/shard",
    // An allocator that counts.
    "server/tests/memory",
    "worker/src/api",
    "worker/src/base/task",
    "worker/src/cuda",
    "worker/src/gpu",
    "worker/src/nic",
    "worker/src/rounds/memory",
];

/// Words that a safety note may not rest on: they name no invariant.
const EMPTY: &[&str] = &["values are valid", "trust me", "obviously"];

fn is_allowed(path: &str) -> bool {
    path.starts_with("tests/")
        || ALLOWED.iter().any(|allowed| {
            path.strip_prefix(allowed).is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
        })
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
