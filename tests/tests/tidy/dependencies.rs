//! Dependencies: each is used, has its line in `docs/decisions.md`, and comes from the public
//! registry.

use super::source::{files, root, sources};

/// Members of the workspace.
const MEMBERS: &[&str] =
    &["engine", "server", "worker", "worker/launch", "python", "perf", "tests", "tests/fake_gpu"];

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The names in the dependency tables of a manifest.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut inside = false;
    for line in read(manifest).lines() {
        if line.starts_with('[') {
            inside = line.contains("dependencies]");
        } else if inside && let Some((name, _)) = line.split_once(['.', ' ', '=']) {
            names.push(name.to_owned());
        }
    }
    assert!(!names.is_empty(), "{manifest}: no dependencies were found in it");
    names
}

#[test]
fn each_dependency_is_used() {
    let sources = sources();
    let mut unused = Vec::new();
    for member in MEMBERS {
        let own = format!("{member}/");
        for name in dependencies(&format!("{member}/Cargo.toml")) {
            let word = name.replace('-', "_");
            let used = sources
                .iter()
                .filter(|source| source.path.starts_with(&own))
                .any(|source| !source.places(&word).is_empty());
            if !used {
                unused.push(format!("{member}/Cargo.toml: `{name}` is used nowhere: remove it"));
            }
        }
    }
    assert!(unused.is_empty(), "{}", unused.join("\n"));
}

#[test]
fn each_dependency_has_its_reason() {
    let decisions = read("docs/decisions.md");
    let words: Vec<&str> =
        decisions.split(|c: char| !(c.is_alphanumeric() || c == '-' || c == '_')).collect();
    for name in dependencies("Cargo.toml") {
        let ours = name.starts_with("bps-");
        assert!(
            ours || words.contains(&name.as_str()),
            "docs/decisions.md has no line for `{name}`: what is it for, and what was the choice?"
        );
    }
}

#[test]
fn dependencies_come_from_the_public_registry() {
    let lock = read("Cargo.lock");
    for line in lock.lines().filter(|line| line.starts_with("source = ")) {
        let public = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";
        assert_eq!(line, public, "Cargo.lock: every crate comes from the public registry");
    }
    assert!(files("", "Cargo.toml").len() > MEMBERS.len(), "a member is missing");
}
