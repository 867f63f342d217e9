# The modules of the workspace, which ./... alone does not reach.
PACKAGES = ./... ./integration/... ./examples/...
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
TESTFLAGS =

.PHONY: test race lint fmt vet staticcheck bench

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
