"""A bank, a shop and a hospital hold different columns of the same records (here: strips of images)."""

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from vafl import VerticalClassifier

X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
columns = {"bank": range(24), "shop": range(24, 40), "hospital": range(40, 64)}

together = VerticalClassifier(parties=columns, epochs=10, random_state=0).fit(X_train, y_train)
print(f"together: {together.score(X_test, y_test):.0%} right")

for party, own in columns.items():
    alone = VerticalClassifier(parties={party: own}, epochs=10, random_state=0).fit(X_train, y_train)
    score, sent = alone.score(X_test, y_test), together.traffic_[party].bytes_up
    delay = together.delays_[party].mean
    print(f"{party} alone: {score:.0%} right; together: {sent:,} bytes sent, used {delay:.1f} updates later")
