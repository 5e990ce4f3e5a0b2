// The conformance suite of the Gateway API Inference Extension, with a base manifest of ours.
//
//	gateway-conformance version
//	gateway-conformance base
//	gateway-conformance -base=FILE -test.v -gateway-class=NAME …
//
// The second prints the suite's own base manifest. The third runs the suite with FILE in its place,
// and takes the flags of Go's tests and of the suite.
package main

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"testing"
	"time"

	"sigs.k8s.io/gateway-api-inference-extension/conformance"
)

const baseName = "resources/base.yaml"

var version = "unknown"

// overlay has the file `base` as the base manifest, and the suite's other files.
type overlay struct{ base string }

func (files overlay) Open(name string) (fs.File, error) {
	if name == baseName {
		return os.Open(files.base)
	}
	return conformance.Manifests.Open(name)
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == "version" {
		fmt.Println(version)
		return
	}
	if len(os.Args) == 2 && os.Args[1] == "base" {
		text, err := conformance.Manifests.ReadFile(baseName)
		if err != nil {
			panic(err)
		}
		os.Stdout.Write(text)
		return
	}
	base := flag.String("base", "", "the base manifest")
	limit := flag.Duration("consistency", 30*time.Second, "time for three equal answers in a row")
	suite := func(t *testing.T) {
		options := conformance.DefaultOptions(t)
		options.ManifestFS = []fs.FS{overlay{*base}}
		options.TimeoutConfig.MaxTimeToConsistency = *limit
		conformance.RunConformanceWithOptions(t, options)
	}
	matchAll := func(_, _ string) (bool, error) { return true, nil }
	testing.Main(matchAll, []testing.InternalTest{{Name: "Conformance", F: suite}}, nil, nil)
}
