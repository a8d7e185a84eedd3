//! One word for one thing: words that fit many things name one type each in the crates that ship.

use super::source::{Source, Violation, report, sources};

/// The crates that ship. Tests and measurements may have types of their own by any name.
const CRATES: [&str; 4] = ["engine/", "server/", "worker/", "python/"];

/// Words that several types had once. Who needs one that is taken says what its thing is: `Tensor`
/// is what rounds are of, and a tensor in the registry is `Registered`.
const WORDS: [&str; 7] = ["Answer", "Granted", "Link", "Peer", "Plan", "Tensor", "Waiting"];

#[test]
fn a_word_names_one_type() {
    let sources: Vec<Source> = sources();
    let ships = |source: &&Source| CRATES.iter().any(|folder| source.path.starts_with(folder));
    let mut first: [Option<String>; WORDS.len()] = Default::default();
    let mut violations: Vec<Violation> = Vec::new();
    for source in sources.iter().filter(ships) {
        for (line, code) in source.code.iter().enumerate().filter(|(line, _)| !source.test[*line]) {
            let name = defined(code);
            let Some(word) = WORDS.iter().position(|word| name == Some(word)) else { continue };
            if let Some(other) = &first[word] {
                let message = format!("a second type `{}`, after {other}: name it", WORDS[word]);
                violations.push(source.violation(line, message));
            } else {
                first[word] = Some(format!("{}:{}", source.path, line + 1));
            }
        }
    }
    report(&violations);
    for (word, found) in WORDS.iter().zip(&first) {
        assert!(found.is_some(), "no type is named `{word}`: take it off the list");
    }
}

/// The name of the type that a line of code defines, if it defines one.
fn defined(code: &str) -> Option<&str> {
    // An alias that is indented is one of a trait's.
    let is_inner = code.starts_with(' ');
    let is_before = |word: &&str| *word == "unsafe" || word.starts_with("pub");
    let mut words = code.split_whitespace().skip_while(is_before);
    let mut words = match words.next()? {
        // `pub(in crate::some::place)`.
        inside if inside.ends_with(')') => words.skip_while(|word| *word == "unsafe"),
        kind => return name(kind, words.next()?, is_inner),
    };
    name(words.next()?, words.next()?, is_inner)
}

fn name<'a>(kind: &str, rest: &'a str, is_inner: bool) -> Option<&'a str> {
    let is_type =
        matches!(kind, "struct" | "enum" | "trait" | "union") || kind == "type" && !is_inner;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    is_type.then_some(&rest[..end])
}

#[test]
fn definitions_are_found_whatever_their_visibility() {
    let plan = [
        "struct Plan {",
        "pub struct Plan;",
        "    pub(super) struct Plan(u32);",
        "pub(in crate::topo) enum Plan {",
        "pub unsafe trait Plan: Send {",
        "trait Plan<T> {",
        "type Plan = u32;",
    ];
    assert!(plan.iter().all(|line| defined(line) == Some("Plan")));
    let others = ["    type Plan = u32;", "use super::Plan;", "    Plan {", "impl Plan {", ""];
    assert!(others.iter().all(|line| defined(line).is_none_or(|name| name != "Plan")));
}
