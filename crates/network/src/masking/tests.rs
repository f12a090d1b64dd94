//! Masking and putting back.

use proptest::prelude::*;

use super::*;

const TOKEN: &str = "ghp_a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2";

fn env(variables: &[(&str, &str)]) -> BTreeMap<String, String> {
    variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn custom(
    patterns: &[&str],
    urls: &[&str],
    auth: &[&str],
    header: Option<&str>,
) -> CredentialProvider {
    let strings = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
    CredentialProvider {
        env: vec!["SECRET".into()],
        patterns: strings(patterns),
        url_prefixes: strings(urls),
        auth: strings(auth),
        header: header.map(str::to_owned),
        ..CredentialProvider::default()
    }
}

fn host(text: &str) -> Host {
    Host::parse(text).unwrap()
}

#[test]
fn well_known_secrets_get_stand_ins_of_their_form() {
    let masker = Masker::new().unwrap();
    let mut first = env(&[
        ("GH_TOKEN", TOKEN),
        ("GITHUB_TOKEN", TOKEN),
        ("OPENAI_API_KEY", "short"),
        ("REMOTE", &format!("https://{TOKEN}@github.com")),
        ("PATH", "/bin"),
        ("GH_ENTERPRISE_TOKEN", "without a host"),
    ]);
    let masking = masker.mask(&mut first, &BTreeMap::new());
    let standin = first["GH_TOKEN"].clone();
    assert!(standin.starts_with("ghp_masked") && standin.len() == TOKEN.len(), "{standin}");
    assert_ne!(first["GITHUB_TOKEN"], standin);
    assert!(
        first["OPENAI_API_KEY"].starts_with("sk-masked") && first["OPENAI_API_KEY"].len() == 51
    );
    assert!(!first["REMOTE"].contains(TOKEN) && first["REMOTE"].contains("ghp_masked"));
    assert_eq!(first["PATH"], "/bin");
    assert_eq!(first[BROKER_ACTIVE], "1");
    let names: Vec<(String, String)> = serde_json::from_str(&first[BROKERED]).unwrap();
    let names: BTreeMap<_, _> = names.into_iter().collect();
    assert_eq!(names["GH_TOKEN"], standin);
    assert_eq!(names["@alias:GH_TOKEN"], standin);
    assert!(first["REMOTE"].contains(&names["@alias:REMOTE"]));
    assert_eq!(names.len(), 9);
    // The same value keeps its stand-in, another does not.
    let mut second =
        env(&[("GH_TOKEN", TOKEN), ("GH_ENTERPRISE_TOKEN", "x"), ("GH_HOST", "git.corp")]);
    let enterprise = masker.mask(&mut second, &BTreeMap::new());
    assert_eq!(second["GH_TOKEN"], standin);
    assert!(second["GH_ENTERPRISE_TOKEN"].starts_with("ghp_masked"));
    assert!(enterprise.bindings.concern(&host("git.corp"), 443));
    assert!(!masking.bindings.concern(&host("git.corp"), 443));
    assert!(!format!("{masking:?}{masker:?}").contains(TOKEN));
    let mut none = env(&[]);
    masker.mask(&mut none, &BTreeMap::new());
    assert_eq!(none[BROKERED], "[]");
}

#[test]
fn secrets_are_put_back_where_they_belong() {
    let mut env = env(&[("SECRET", "s_0123456789abcdef")]);
    let provider = CredentialProvider {
        prefix: Some("t ".into()),
        ..custom(
            &["s_[0-9a-f]{16}"],
            &["https://a.com/api", "https://*.b.com:8443"],
            &["bearer", "basic", "header"],
            Some("X-Token"),
        )
    };
    let masking = Masker::new().unwrap().mask(&mut env, &[("p".to_owned(), provider)].into());
    assert_eq!(masking.ignored, []);
    let standin = env["SECRET"].clone();
    assert_eq!(standin.len(), 18);
    let basic = |plain: &str| format!("Basic {}", base64_simd::STANDARD.encode_to_string(plain));
    let send = |at: &str, port: u16, path: &str, name: &'static str, value: String| {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        masking.bindings.apply(&host(at), port, path, &mut headers);
        headers[name].to_str().unwrap().to_owned()
    };
    let bearer = || format!("Bearer {standin}");
    let real = "s_0123456789abcdef";
    for (value, expected) in [
        (bearer(), format!("Bearer {real}")),
        (format!("bearer {standin}"), format!("bearer {real}")),
        (basic(&format!("{standin}:x")), basic(&format!("{real}:x"))),
        (basic(&format!("x:{standin}")), basic(&format!("x:{real}"))),
        // Another scheme than those of the provider, another value, more than the value.
        (format!("token {standin}"), format!("token {standin}")),
        (format!("Bearer {standin}x"), format!("Bearer {standin}x")),
        ("Bearer other".into(), "Bearer other".into()),
        (basic(&standin), basic(&standin)),
        ("Basic ?".into(), "Basic ?".into()),
        (standin.clone(), standin.clone()),
    ] {
        assert_eq!(send("a.com", 443, "/api/x", "authorization", value), expected);
    }
    assert_eq!(send("a.com", 443, "/api", "x-token", format!("t {standin}")), format!("t {real}"));
    assert_eq!(send("a.com", 443, "/api", "x-token", standin.clone()), standin);
    assert_eq!(send("a.com", 443, "/api", "x-other", bearer()), bearer());
    for (at, port, path, goes) in [
        ("a.com", 443, "/api", true),
        ("a.com", 443, "/api/", true),
        ("c.b.com", 8443, "/", true),
        ("d.c.b.com", 8443, "/any/../path", true),
        ("a.com", 443, "/apix", false),
        ("a.com", 443, "/", false),
        ("a.com", 444, "/api", false),
        ("x.a.com", 443, "/api", false),
        ("b.com", 8443, "/", false),
        ("cb.com", 8443, "/", false),
        ("c.b.com", 443, "/", false),
        // Paths that a server may read as another one.
        ("a.com", 443, "/api/../other", false),
        ("a.com", 443, "/api/%2E%2e/other", false),
        ("a.com", 443, "/api/..%2fother", false),
        ("a.com", 443, "/api//other", false),
        ("a.com", 443, "/api/..;/other", false),
        ("a.com", 443, "/api/%252e%252e/other", false),
        ("a.com", 443, "/api/..\\other", false),
    ] {
        let sent = send(at, port, path, "authorization", bearer());
        assert_eq!(sent == format!("Bearer {real}"), goes, "{at}:{port}{path}");
        assert!(goes || sent == bearer());
    }
}

#[test]
fn providers_that_break_a_rule_are_ignored() {
    let url = &["https://a.com/"][..];
    let mut no_env = custom(&["x+"], url, &[], None);
    no_env.env.clear();
    let mut glob = custom(&["x+"], url, &[], None);
    glob.env = vec!["S*".into()];
    let mut from_env = custom(&["x+"], &[], &[], None);
    from_env.url_prefix_from_env = Some("URL".into());
    let mut prefix = custom(&["x+"], url, &[], None);
    prefix.prefix = Some("t".into());
    let bad_url = |url: &str| ProviderError::Prefix(url.to_owned());
    for (provider, expected) in [
        (custom(&["x+"], url, &[], None), None),
        (from_env, None),
        (no_env, Some(ProviderError::Env)),
        (glob, Some(ProviderError::Env)),
        (custom(&[], url, &[], None), Some(ProviderError::Patterns)),
        (custom(&["("], url, &[], None), Some(ProviderError::Patterns)),
        (custom(&["(x{1000}){1000}"], url, &[], None), Some(ProviderError::Patterns)),
        (custom(&["x+"], &[], &[], None), Some(ProviderError::NoPrefix)),
        (custom(&["x+"], &["http://a.com/"], &[], None), Some(bad_url("http://a.com/"))),
        (custom(&["x+"], &["https://u@a.com/"], &[], None), Some(bad_url("https://u@a.com/"))),
        (custom(&["x+"], &["https://a.com/?q"], &[], None), Some(bad_url("https://a.com/?q"))),
        (custom(&["x+"], &["https://a.com:x/"], &[], None), Some(bad_url("https://a.com:x/"))),
        (custom(&["x+"], &["https://*.1.2.3.4/"], &[], None), Some(bad_url("https://*.1.2.3.4/"))),
        (
            custom(&["x+"], &["https://a.com/a/../b"], &[], None),
            Some(bad_url("https://a.com/a/../b")),
        ),
        (custom(&["x+"], url, &["header"], None), Some(ProviderError::Header)),
        (custom(&["x+"], url, &["header"], Some("Host")), Some(ProviderError::Header)),
        (custom(&["x+"], url, &["header"], Some("a b")), Some(ProviderError::Header)),
        (custom(&["x+"], url, &[], Some("X")), Some(ProviderError::Header)),
        (prefix, Some(ProviderError::Header)),
        (custom(&["x+"], url, &["magic"], None), Some(ProviderError::Auth("magic".into()))),
    ] {
        let mut env = env(&[("SECRET", "xxxxxxxx"), ("URL", "https://b.com/")]);
        let masking = Masker::new().unwrap().mask(&mut env, &[("p".to_owned(), provider)].into());
        let found = masking.ignored.first().map(|(_, error)| error.clone());
        assert_eq!(found, expected);
        assert_eq!(env["SECRET"] == "xxxxxxxx", expected.is_some());
    }
    // A value that does not match stays, and so does one that the pattern leaves no other for.
    for pattern in ["y+", "xxxxxxxx", "x"] {
        let provider = custom(&[pattern], url, &[], None);
        let mut env = env(&[("SECRET", "xxxxxxxx")]);
        Masker::new().unwrap().mask(&mut env, &[("p".to_owned(), provider)].into());
        assert_eq!(env["SECRET"], "xxxxxxxx");
    }
}

proptest! {
    /// Whatever names their hosts, well-known secrets are masked; one without a usable host goes nowhere.
    #[test]
    fn well_known_secrets_are_masked_whatever_names_their_host(
        name in prop::sample::select(vec![
            "GH_TOKEN", "GITHUB_TOKEN", "GH_ENTERPRISE_TOKEN", "GITHUB_ENTERPRISE_TOKEN", "OPENAI_API_KEY",
        ]),
        secret in "(ghp_|sk-|)[a-zA-Z0-9]{8,40}",
        place in prop::option::of("(https?://)?( |[a-z]{1,5}@)?[a-z]{1,8}(\\.corp)?(:[0-9]{1,6})?[/?#]?[a-z]{0,3}|.{0,6}"),
    ) {
        let mut env: BTreeMap<String, String> = [(name.to_owned(), secret.clone())].into();
        if let Some(place) = &place {
            env.insert("GH_HOST".into(), place.clone());
            env.insert("OPENAI_BASE_URL".into(), place.clone());
        }
        let masking = Masker::new().unwrap().mask(&mut env, &BTreeMap::new());
        prop_assert!(env.values().all(|value| !value.contains(&secret)), "{:?}", place);
        let mut headers = HeaderMap::new();
        headers.insert("authorization", format!("Bearer {}", env[name]).parse().unwrap());
        masking.bindings.apply(&host("elsewhere.com"), 443, "/", &mut headers);
        prop_assert!(!headers["authorization"].to_str().unwrap().contains(&secret));
    }

    /// No environment keeps a secret that was masked, in whatever variable it is.
    #[test]
    fn no_variable_keeps_a_masked_secret(
        secret in "[a-z]{8,20}",
        around in proptest::collection::vec(("[A-Z]{1,6}", ".{0,8}", ".{0,8}"), 0..6),
    ) {
        let mut env: BTreeMap<String, String> = around
            .into_iter()
            .map(|(name, before, after)| (name, format!("{before}{secret}{after}")))
            .collect();
        env.insert("OPENAI_API_KEY".into(), secret.clone());
        let standins = Masker::new().unwrap().mask(&mut env, &BTreeMap::new());
        prop_assert!(env.values().all(|value| !value.contains(&secret)));
        let shown = format!("{standins:?}");
        prop_assert!(!shown.contains(&secret));
    }

    /// A stand-in matches the pattern of its secret as a whole.
    #[test]
    fn stand_ins_match_their_pattern(index in 0usize..6) {
        let patterns = ["t_[a-z0-9]{8,12}", "(a|b)[A-F]+-x?", r"\d{4}\w+", "[^a]{9}", "x.{8}", "(?i)key[0-9]*"];
        let pattern = patterns[index];
        let regex = regex::Regex::new(&format!("^(?:{pattern})$")).unwrap();
        let standin = standin::matching(&regex, pattern, "secret").unwrap();
        prop_assert!(regex.is_match(&standin), "{}", standin);
    }
}
