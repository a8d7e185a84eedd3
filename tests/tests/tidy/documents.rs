//! The documents hold what they point at: links, headings, files, variables.

use super::source::{Violation, files, report, root};

/// A document, with the lines inside fenced code blocks told apart.
struct Document {
    path: String,
    lines: Vec<(String, bool)>,
}

fn documents() -> Vec<Document> {
    let documents: Vec<Document> = files("", ".md")
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(root().join(&path)).expect("documents are UTF-8");
            let mut fenced = false;
            let lines = text.lines().map(|line| {
                let fence = line.trim_start().starts_with("```");
                fenced ^= fence;
                (line.to_owned(), fenced || fence)
            });
            Document { lines: lines.collect(), path }
        })
        .collect();
    assert!(!documents.is_empty(), "no document found: is the root right?");
    documents
}

/// What stands between two marks, each time on a line.
fn between<'a>(line: &'a str, open: &'a str, close: &'a str) -> Vec<&'a str> {
    let mut rest = line;
    let mut found = Vec::new();
    while let Some(start) = rest.find(open) {
        let inner = &rest[start + open.len()..];
        let Some(end) = inner.find(close) else { break };
        found.push(&inner[..end]);
        rest = &inner[end + close.len()..];
    }
    found
}

/// The anchor that a heading gets from the usual renderers.
fn anchor(heading: &str) -> String {
    heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

fn anchors(path: &str) -> Vec<String> {
    documents()
        .iter()
        .filter(|document| document.path == path)
        .flat_map(|document| &document.lines)
        .filter(|(line, fenced)| !fenced && line.starts_with('#'))
        .map(|(line, _)| anchor(line))
        .collect()
}

/// `docs/a/../b.md` as `docs/b.md`.
fn normal(path: &str) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in path.split('/') {
        match name {
            "" | "." => {}
            ".." => drop(names.pop()),
            name => names.push(name),
        }
    }
    names.join("/")
}

/// What is wrong with a link from a document, if anything.
fn broken(from: &str, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, heading) = target.split_once('#').unwrap_or((target, ""));
    let folder = from.rsplit_once('/').map_or("", |(folder, _)| folder);
    let file = if file.is_empty() { from.to_owned() } else { normal(&format!("{folder}/{file}")) };
    if !root().join(&file).exists() {
        return Some(format!("links to `{target}`, but there is no {file}"));
    }
    if !heading.is_empty() && !anchors(&file).iter().any(|anchor| anchor == heading) {
        return Some(format!("links to `{target}`, but {file} has no such heading"));
    }
    None
}

#[test]
fn links_lead_somewhere() {
    let mut violations = Vec::new();
    for document in documents() {
        for (line, (text, fenced)) in document.lines.iter().enumerate() {
            if *fenced {
                continue;
            }
            for target in between(text, "](", ")") {
                if let Some(message) = broken(&document.path, target) {
                    let path = document.path.clone();
                    violations.push(Violation { path, line: line + 1, message });
                }
            }
        }
    }
    report(&violations);
}

#[test]
fn files_that_documents_name_exist() {
    let mut violations = Vec::new();
    for document in documents() {
        for (line, (text, fenced)) in document.lines.iter().enumerate() {
            for name in between(text, "`", "`") {
                let name = name.split_once(' ').map_or(name, |(command, _)| command);
                let first = name.split('/').next().unwrap_or_default();
                let ours = ["engine", "server", "worker", "python", "perf", "tests", "docs"];
                let is_path = name.contains('/')
                    && ours.contains(&first)
                    && name.chars().all(|c| c.is_alphanumeric() || "/._-".contains(c));
                if !*fenced && is_path && !root().join(name).exists() {
                    let message = format!("names `{name}`, which is not there");
                    let path = document.path.clone();
                    violations.push(Violation { path, line: line + 1, message });
                }
            }
        }
    }
    report(&violations);
}

/// The variables that a text names: `BPS_`, `BYTEPS_` and `DMLC_` words.
fn variables(text: &str) -> Vec<&str> {
    text.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))
        .filter(|word| ["BPS_", "BYTEPS_", "DMLC_"].iter().any(|prefix| word.starts_with(prefix)))
        .filter(|word| !word.ends_with('_'))
        .collect()
}

#[test]
fn variables_that_documents_name_are_in_the_table() {
    let table = std::fs::read_to_string(root().join("docs/env.md")).expect("it is generated");
    let known = variables(&table);
    let mut violations = Vec::new();
    for document in documents() {
        // The migration guide also names what has no meaning here.
        if document.path == "docs/migrating.md" {
            continue;
        }
        for (line, (text, _)) in document.lines.iter().enumerate() {
            for variable in variables(text) {
                if !known.contains(&variable) {
                    let message = format!("names `{variable}`, which docs/env.md does not have");
                    let path = document.path.clone();
                    violations.push(Violation { path, line: line + 1, message });
                }
            }
        }
    }
    report(&violations);
}

#[test]
fn the_readme_names_the_two_commands() {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("there is a README.md");
    for command in ["python/quickstart", "tests/run"] {
        assert!(readme.contains(command), "README.md does not name {command}");
    }
}

#[test]
fn each_python_exception_has_its_remedy() {
    let errors = std::fs::read_to_string(root().join("python/py/byteps/errors.py")).expect("there");
    let page = std::fs::read_to_string(root().join("docs/troubleshooting.md")).expect("there");
    let mut classes = errors.lines().filter_map(|line| line.strip_prefix("class "));
    let classes: Vec<&str> = classes.by_ref().filter_map(|line| line.split('(').next()).collect();
    assert!(classes.len() > 5, "only {classes:?} found: has errors.py moved?");
    for class in classes {
        // The base class is every one of them.
        let named = class == "BytePSError" || page.contains(&format!("`{class}`"));
        assert!(named, "docs/troubleshooting.md says nothing about `{class}`");
    }
}

#[test]
fn a_broken_link_is_found() {
    assert!(broken("docs/a.md", "../Cargo.toml").is_none());
    assert!(broken("docs/a.md", "no-such-file.md").is_some());
    assert!(broken("docs/a.md", "https://example.org/x").is_none());
    assert_eq!(anchor("## The life of a byte, twice"), "the-life-of-a-byte-twice");
    assert_eq!(between("[a](b) and [c](d#e)", "](", ")"), ["b", "d#e"]);
    assert_eq!(variables("set `BPS_IDLE=busy` (`BPS_`, BYTEPS_X2)"), ["BPS_IDLE", "BYTEPS_X2"]);
}
