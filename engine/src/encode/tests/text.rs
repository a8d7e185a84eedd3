//! Codecs as text.

use super::*;
use crate::encode::CodecError;

#[test]
fn what_is_displayed_is_read() {
    for codec in codecs() {
        let in_bounds = !matches!(codec, Codec::Dithering { levels: 33.., spacing, .. }
            if spacing == Spacing::Natural);
        if in_bounds {
            assert_eq!(codec.to_string().parse(), Ok(codec));
            let json = serde_json::to_string(&codec).expect("text");
            assert_eq!(json, format!("\"{codec}\""));
            assert_eq!(serde_json::from_str::<Codec>(&json).expect("the same"), codec);
        }
    }
    for share in [1, 10, 99, 10_000, 123_456, 999_999, 1_000_000] {
        let codec = Codec::Topk { keep: Keep::PerMillion(share) };
        assert_eq!(codec.to_string().parse(), Ok(codec));
    }
}

#[test]
fn text_is_as_people_write_it() {
    let read = |text: &str| text.parse::<Codec>().map(|codec| codec.to_string());
    for (text, canonical) in [
        ("FP16", "fp16"),
        ("bfloat16", "bf16"),
        ("fp8-e4m3( stochastic )", "fp8_e4m3(stochastic)"),
        ("fp8_e5m2()", "fp8_e5m2"),
        ("int8(stochastic=true)", "int8(stochastic)"),
        ("int8(stochastic=false)", "int8"),
        ("onebit(scaling=1)", "onebit(scaling)"),
        ("topk(k=0.010)", "topk(k=0.01)"),
        ("topk(k=1e-6)", "topk(k=0.000001)"),
        ("topk(k=1.0)", "topk(k=1.0)"),
        ("topk(k=64)", "topk(k=64)"),
        ("randomk(seed=7, k=0.01)", "randomk(k=0.01, seed=7)"),
        ("dithering(levels=4)", "dithering(levels=4, linear, max, seed=0)"),
        ("dithering(l2, k=4, natural, seed=7)", "dithering(levels=4, natural, l2, seed=7)"),
        (
            "dithering(k=4, partition=natural, normalize=l2)",
            "dithering(levels=4, natural, l2, seed=0)",
        ),
    ] {
        assert_eq!(read(text).as_deref(), Ok(canonical), "{text}");
    }
}

#[test]
fn errors_name_what_is_wrong_and_what_is_possible() {
    let refused = |text: &str| match text.parse::<Codec>() {
        Ok(codec) => panic!("{text} is read as {codec}"),
        Err(error) => error.to_string(),
    };
    for (text, part) in [
        ("", "`` is no codec: use one of fp16"),
        ("gzip", "`gzip` is no codec: use one of fp16"),
        ("topk(k=0.01", "parameters stand in parentheses"),
        ("topk(k=(1))", "parameters stand in parentheses"),
        ("topk", "topk needs `k`: give it a count"),
        ("topk(k=0)", "topk: `k` is a count of elements from 1 on"),
        ("topk(k=1.5)", "to 1.0, not `1.5`"),
        ("topk(k=-0.5)", "not `-0.5`"),
        ("topk(k=0.0000001)", "not `0.0000001`"),
        ("topk(k=4294967296)", "not `4294967296`"),
        ("topk(k=1, k=2)", "topk has `k` twice"),
        ("topk(k=1, seed=2)", "topk has no parameter `seed`: use `k`"),
        ("fp16(stochastic)", "fp16 has no parameter `stochastic`: use none"),
        ("int8(stochastic=maybe)", "int8: `stochastic` is true or false, not `maybe`"),
        ("randomk(k=1, seed=-1)", "`seed` is a whole number"),
        ("dithering", "dithering needs `levels`"),
        ("dithering(levels=128)", "not `128`"),
        ("dithering(levels=33, natural)", "not `33`"),
        ("dithering(levels=4, linear, natural)", "`spacing` twice"),
        ("dithering(levels=4, norm=l1)", "`norm` is max or l2, not `l1`"),
        ("dithering(levels=4, k=4)", "`levels` twice"),
    ] {
        assert!(refused(text).contains(part), "{text}: {}", refused(text));
    }
    let long = "x".repeat(1000);
    assert_eq!(long.parse::<Codec>(), Err(CodecError::Long { length: 1000 }));
}

#[test]
fn a_peer_is_held_to_the_bounds() {
    for text in ["\"dithering(levels=200)\"", "\"topk(k=0)\"", "3", "\"\""] {
        assert!(serde_json::from_str::<Codec>(text).is_err(), "{text}");
    }
}
