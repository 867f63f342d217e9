# The modules of the workspace, which ./... alone does not reach.
PACKAGES = ./... ./integration/... ./examples/...
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
TESTFLAGS =

.PHONY: test race lint fmt vet staticcheck bench proof simulate bugs figures fuzz

test:
	go test $(TESTFLAGS) $(PACKAGES)

race:
	go test -race $(TESTFLAGS) $(PACKAGES)

lint: fmt vet staticcheck

fmt:
	@files=$$(gofmt -l .) && if [ -n "$$files" ]; then echo "not gofmted:"; echo "$$files"; exit 1; fi

vet:
	go vet $(PACKAGES)

staticcheck:
	go run $(STATICCHECK) $(PACKAGES)

bench:
	go test -run '^$$' -bench . ./integration/...

# All of the evidence, which takes minutes. Without a package named, go test shows what it prints.
proof:
	cd integration && COORD_PROOF=full go test -count=1 -timeout=60m -run '^TestProof'

# Whole clusters in fake time, each from a seed: see docs/simulation.md.
SEEDS = 1000
FROM = 1
simulate:
	cd integration/sim && go test -count=1 -timeout=0 -v -run '^TestSimulation$$' . -seeds=$(SEEDS) -from=$(FROM)

# Whether the simulation finds seeded bugs, each by random seeds.
BUGS = all
bugs:
	cd integration/sim && go test -count=1 -timeout=0 -v -run '^TestBugs$$' . -bugs=$(BUGS)

# Writes BENCHMARKS.md and its pictures.
figures:
	cd integration && COORD_FIGURES=$(CURDIR) go test -count=1 -timeout=15m -run '^TestFigures$$'

# Finding a smaller input for each new one would take all of the time.
fuzz:
	go test -run '^$$' -fuzz '^FuzzParse$$' -fuzztime=1m -fuzzminimizetime=10x .
	go test -run '^$$' -fuzz '^FuzzIdentifier$$' -fuzztime=1m -fuzzminimizetime=10x .
